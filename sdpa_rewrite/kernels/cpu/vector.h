// Vectors of float, of the width that the instruction set has, and the functions of them that attention needs.

#include <ATen/cpu/vec/vec.h>
#include <cstring>
#if defined(SDPA_REWRITE_TILES)
#include <ATen/native/CPUBlas.h>
#include <c10/util/Exception.h>
#endif

namespace sdpa_rewrite {

using at::vec::Vectorized;
using V = Vectorized<float>;
constexpr int W = V::size();
constexpr float INFINITE = std::numeric_limits<float>::infinity();

// How products of bfloat16 are made, as processor.py chose: of pairs, by dot products (SDPA_REWRITE_DOTS) or, where
// there are rows enough, in tiles by oneDNN (SDPA_REWRITE_TILES); or as floats, which is all that some compilers can.
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__) && !defined(SDPA_REWRITE_FLOATS)
#define SDPA_REWRITE_PAIRS
constexpr bool HAS_DOT = true;
#else
#undef SDPA_REWRITE_TILES
constexpr bool HAS_DOT = false;
#endif
#if defined(SDPA_REWRITE_TILES)
constexpr bool HAS_TILES = true;
#else
constexpr bool HAS_TILES = false;
#endif

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// c + a * b; of words that hold two bfloat16 each: c + a0 * b0 + a1 * b1.
template <bool DOT>
inline V fma(V a, V b, V c) {
#if defined(SDPA_REWRITE_PAIRS)
  if constexpr (DOT) {
    return _mm512_dpbf16_ps(c, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
  }
#endif
  return at::vec::fmadd(a, b, c);
}

inline float largest(V x) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_reduce_max_ps(x);
#elif defined(CPU_CAPABILITY_AVX2)
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
#else
  float lanes[W], out;
  x.store(lanes);
  out = lanes[0];
  for (int k = 1; k < W; ++k) out = lanes[k] > out ? lanes[k] : out;
  return out;
#endif
}

inline float total(V x) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_reduce_add_ps(x);
#elif defined(CPU_CAPABILITY_AVX2)
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#else
  float lanes[W], out = 0;
  x.store(lanes);
  for (int k = 0; k < W; ++k) out += lanes[k];
  return out;
#endif
}

// The larger of each two; the second where one is NaN.
inline V larger(V a, V b) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_max_ps(a, b);
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_max_ps(a, b);
#else
  return at::vec::maximum(a, b);
#endif
}

// The smaller of each two; the second where one is NaN.
inline V smaller(V a, V b) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_min_ps(a, b);
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_min_ps(a, b);
#else
  return at::vec::minimum(a, b);
#endif
}

// tanh(x), as x times a quotient of polynomials in x * x.  Their coefficients are a least-maximum fit (Lawson, 1961) of
// the relative error on [-9.02, 9.02], beyond which tanh is 1 in float: 2.1e-8, a third of its rounding.
inline V hyperbolic_tangent(V x) {
  const V one(1.0f), bound(9.02f);
  const V y = smaller(bound, larger(V(-9.02f), x));
  const V square = y * y;
  V above(1.331884178e-8f), below(7.761923955e-7f);
  for (const float c : {2.058331155e-5f, 3.494024264e-3f, 0.1337970939f, 0.9999999791f}) {
    above = at::vec::fmadd(above, square, V(c));
  }
  for (const float c : {3.283075942e-4f, 2.58710343e-2f, 0.4671302467f, 1.0f}) {
    below = at::vec::fmadd(below, square, V(c));
  }
  return smaller(one, larger(V(-1.0f), y * above / below));
}

// While one lives, what would be denormal is 0: CPUs take some hundred cycles for one of them, and far off the largest
// logit of a row there may be many.  What programs compute is not for it: a mask may be written as log(mask + 1e-45).
class Flushing {
#if defined(__SSE__)
  static constexpr unsigned FLUSH_TO_ZERO = 0x8000;
  const unsigned before_ = _mm_getcsr();

 public:
  Flushing() { _mm_setcsr(before_ | FLUSH_TO_ZERO); }
  ~Flushing() { _mm_setcsr(before_); }
  Flushing(const Flushing&) = delete;
#endif
};

// e**x for x <= 0 or little above.  0 for -infinity, NaN for NaN.
// As 2**y: a polynomial of degree 6 on [0, 1), a least-maximum fit (Remez) of the relative error, 2e-9, times a power of
// two; without AVX-512, Cody and Waite's reduction and one on [-ln 2 / 2, ln 2 / 2].
inline V exponential(V x) {
#if defined(CPU_CAPABILITY_AVX512)
  const V y = x * V(1.44269504088896341f);
  const V f = _mm512_reduce_ps(y, 0x09); // y - floor(y), and 0 for -infinity
  V p(2.161291497e-4f);
  for (const float c : {1.246784645e-3f, 9.675451565e-3f, 5.548528062e-2f, 0.2402293056f, 0.6931470444f, 1.0f}) {
    p = at::vec::fmadd(p, f, V(c));
  }
  return _mm512_scalef_ps(p, y); // times 2**floor(y)
#elif defined(CPU_CAPABILITY_AVX2)
  const V low(-87.3f);
  const V y = larger(low, x);
  const V n = (y * V(1.44269504088896341f)).round();
  const V f = at::vec::fmadd(n, V(2.12194440e-4f), at::vec::fmadd(n, V(-0.693359375f), y));
  V p(1.38888889e-3f);
  for (const float c : {8.33333333e-3f, 4.16666667e-2f, 1.66666667e-1f, 0.5f, 1.0f, 1.0f}) {
    p = at::vec::fmadd(p, f, V(c));
  }
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_andnot_ps(_mm256_cmp_ps(x, low, _CMP_LT_OQ), _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
#else
  return x.exp();
#endif
}

template <class T>
inline float to_float(T x) { return static_cast<float>(x); }

// dst[0:n] = float(src[0:n])
template <class T>
inline void convert(const T* src, float* dst, int64_t n) {
  int64_t k = 0;
  if constexpr (std::is_same_v<T, float>) {
    for (; k + W <= n; k += W) V::loadu(src + k).store(dst + k);
  } else {
    constexpr int64_t N = Vectorized<T>::size();
    for (; k + N <= n; k += N) {
      auto [a, b] = at::vec::convert_to_float<T>(Vectorized<T>::loadu(src + k));
      a.store(dst + k);
      b.store(dst + k + W);
    }
  }
  for (; k < n; ++k) dst[k] = to_float(src[k]);
}

// dst[0:n] = T(src[0:n] * factor)
template <class T>
inline void scaled(const float* src, T* dst, int64_t n, float factor) {
  const V f(factor);
  int64_t k = 0;
  if constexpr (std::is_same_v<T, float>) {
    for (; k + W <= n; k += W) (V::loadu(src + k) * f).store(dst + k);
  } else {
    constexpr int64_t N = Vectorized<T>::size();
    for (; k + N <= n; k += N) {
      at::vec::convert_from_float<T>(V::loadu(src + k) * f, V::loadu(src + k + W) * f).store(dst + k);
    }
  }
  for (; k < n; ++k) dst[k] = static_cast<T>(src[k] * factor);
}

inline uint32_t word(c10::BFloat16 low, c10::BFloat16 high) { return (uint32_t(high.x) << 16) | low.x; }

// Uniform numbers of Inductor's generator, Philox 4x32-10 (Salmon et al., 2011), at dst.size() consecutive offsets.
inline void uniform(float* dst, uint32_t seed, uint32_t offset, int64_t n) {
  int64_t k = 0;
#if defined(CPU_CAPABILITY_AVX512)
  const __m512i m0 = _mm512_set1_epi64(0xD2511F53), m1 = _mm512_set1_epi64(0xCD9E8D57);
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (; k + 16 <= n; k += 16) {
    __m512i c0 = _mm512_add_epi32(_mm512_set1_epi32(offset + uint32_t(k)), lanes);
    __m512i c1 = _mm512_setzero_si512(), c2 = c1, c3 = c1;
    uint32_t k0 = seed, k1 = 0;
    for (int round = 0; round < 10; ++round) {
      const __m512i a = _mm512_mul_epu32(c0, m0), b = _mm512_mul_epu32(_mm512_srli_epi64(c0, 32), m0);
      const __m512i c = _mm512_mul_epu32(c2, m1), d = _mm512_mul_epu32(_mm512_srli_epi64(c2, 32), m1);
      const __m512i low0 = _mm512_mask_blend_epi32(0xAAAA, a, _mm512_slli_epi64(b, 32));
      const __m512i high0 = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(a, 32), b);
      const __m512i low1 = _mm512_mask_blend_epi32(0xAAAA, c, _mm512_slli_epi64(d, 32));
      const __m512i high1 = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(c, 32), d);
      c0 = _mm512_ternarylogic_epi32(high1, c1, _mm512_set1_epi32(k0), 0x96);
      c2 = _mm512_ternarylogic_epi32(high0, c3, _mm512_set1_epi32(k1), 0x96);
      c1 = low1;
      c3 = low0;
      k0 += 0x9E3779B9;
      k1 += 0xBB67AE85;
    }
    const __m512 x = _mm512_cvtepi32_ps(_mm512_and_si512(c0, _mm512_set1_epi32(0x7FFFFFFF)));
    _mm512_storeu_ps(dst + k, _mm512_mul_ps(x, _mm512_set1_ps(4.6566127342e-10f)));
  }
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256i m0 = _mm256_set1_epi64x(0xD2511F53), m1 = _mm256_set1_epi64x(0xCD9E8D57);
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  for (; k + 8 <= n; k += 8) {
    __m256i c0 = _mm256_add_epi32(_mm256_set1_epi32(int(offset + uint32_t(k))), lanes);
    __m256i c1 = _mm256_setzero_si256(), c2 = c1, c3 = c1;
    uint32_t k0 = seed, k1 = 0;
    for (int round = 0; round < 10; ++round) {
      const __m256i a = _mm256_mul_epu32(c0, m0), b = _mm256_mul_epu32(_mm256_srli_epi64(c0, 32), m0);
      const __m256i c = _mm256_mul_epu32(c2, m1), d = _mm256_mul_epu32(_mm256_srli_epi64(c2, 32), m1);
      const __m256i low0 = _mm256_blend_epi32(a, _mm256_slli_epi64(b, 32), 0xAA);
      const __m256i high0 = _mm256_blend_epi32(_mm256_srli_epi64(a, 32), b, 0xAA);
      const __m256i low1 = _mm256_blend_epi32(c, _mm256_slli_epi64(d, 32), 0xAA);
      const __m256i high1 = _mm256_blend_epi32(_mm256_srli_epi64(c, 32), d, 0xAA);
      c0 = _mm256_xor_si256(_mm256_xor_si256(high1, c1), _mm256_set1_epi32(int(k0)));
      c2 = _mm256_xor_si256(_mm256_xor_si256(high0, c3), _mm256_set1_epi32(int(k1)));
      c1 = low1;
      c3 = low0;
      k0 += 0x9E3779B9;
      k1 += 0xBB67AE85;
    }
    const __m256 x = _mm256_cvtepi32_ps(_mm256_and_si256(c0, _mm256_set1_epi32(0x7FFFFFFF)));
    _mm256_storeu_ps(dst + k, _mm256_mul_ps(x, _mm256_set1_ps(4.6566127342e-10f)));
  }
#endif
  for (; k < n; ++k) dst[k] = normalized_rand_cpu(seed, offset + uint32_t(k));
}

#if defined(__SANITIZE_ADDRESS__)
// Each part is an allocation of its own, so that a step from one into the next is found.
class Workspace {
 public:
  explicit Workspace(int64_t) {}
  float* take(int64_t floats) {
    const std::align_val_t line{64};
    parts_.emplace_back(new (line) float[round_up(floats, 16)], [line](float* p) { ::operator delete[](p, line); });
    return parts_.back().get();
  }

 private:
  std::vector<std::shared_ptr<float>> parts_;
};
#else
// Aligned memory of one thread.
class Workspace {
 public:
  explicit Workspace(int64_t floats) : data_(new float[floats + 32]), at_(aligned(data_.get())) {
#if defined(SDPA_REWRITE_POISONED) // by tests: nothing may depend on what memory holds that was never written
    std::fill_n(data_.get(), floats + 32, std::numeric_limits<float>::quiet_NaN());
#endif
  }
  float* take(int64_t floats) {
    float* out = at_;
    at_ += round_up(floats, 16);
    return out;
  }

 private:
  static float* aligned(float* p) { return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(p) + 63) / 64 * 64); }
  std::unique_ptr<float[]> data_;
  float* at_;
};
#endif

} // namespace sdpa_rewrite
