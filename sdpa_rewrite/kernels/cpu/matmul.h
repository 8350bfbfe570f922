// Small matrix products on packed operands.  All memory is in words of four bytes: a float, or a pair of bfloat16
// (DOT) that are neighbours along the axis that is summed over.

namespace sdpa_rewrite {

constexpr int MR = 6;                 // rows of a register tile
constexpr int NR = W == 8 ? 2 : 4;    // vectors of a register tile's row
constexpr int64_t TILE = 64;          // keys of a tile of scores

// c[0:M, 0:N*W] = sum_p a[., p] * b[p, .] + (c * alpha).  `fresh`: without c.  `alpha` may be null: one.
template <bool DOT, int M, int N>
inline void register_tile(const float* a, int64_t row, int64_t step, const float* b, int64_t ldb, float* c, int64_t ldc,
                          int64_t k, const float* alpha, bool fresh) {
  V sum[M][N];
#pragma GCC unroll 8
  for (int r = 0; r < M; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sum[r][n] = V(0.0f);
  }
  const float* at = a;
  for (int64_t p = 0; p < k; ++p, at += step, b += ldb) {
    V right[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) right[n] = V::loadu(b + n * W);
#pragma GCC unroll 8
    for (int r = 0; r < M; ++r) {
      const V left(at[r * row]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[r][n] = fma<DOT>(left, right[n], sum[r][n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < M; ++r) {
    const V factor(alpha ? alpha[r] : 1.0f);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      float* out = c + r * ldc + n * W;
      (fresh ? sum[r][n] : at::vec::fmadd(V::loadu(out), factor, sum[r][n])).store(out);
    }
  }
}

template <bool DOT, int N>
inline void column_of_tiles(const float* a, int64_t row, int64_t step, const float* b, int64_t ldb, float* c,
                            int64_t ldc, int64_t m, int64_t k, const float* alpha, bool fresh) {
  int64_t r = 0;
  const auto part = [&](auto size) {
    constexpr int M = decltype(size)::value;
    for (; r + M <= m; r += M) {
      register_tile<DOT, M, N>(a + r * row, row, step, b, ldb, c + r * ldc, ldc, k, alpha ? alpha + r : nullptr, fresh);
    }
  };
  part(std::integral_constant<int, MR>{});
  part(std::integral_constant<int, 4>{});
  part(std::integral_constant<int, 2>{});
  part(std::integral_constant<int, 1>{});
}

template <bool DOT>
inline void multiply_some(const float* a, int64_t row, int64_t step, const float* b, int64_t ldb, float* c, int64_t ldc,
                     int64_t m, int64_t n, int64_t k, const float* alpha, bool fresh) {
  int64_t j = 0;
  for (; j + NR * W <= n; j += NR * W) {
    column_of_tiles<DOT, NR>(a, row, step, b + j, ldb, c + j, ldc, m, k, alpha, fresh);
  }
  if constexpr (NR > 2) {
    if (j + 2 * W <= n) {
      column_of_tiles<DOT, 2>(a, row, step, b + j, ldb, c + j, ldc, m, k, alpha, fresh);
      j += 2 * W;
    }
  }
  if (j < n) column_of_tiles<DOT, 1>(a, row, step, b + j, ldb, c + j, ldc, m, k, alpha, fresh);
}

#if defined(SDPA_REWRITE_TILES)
inline std::atomic<bool> tiles_work{true}; // until oneDNN refuses: torch was built without its kernels, or it is off

// c[m, n] (+)= a[m, k] b[k, n] of pairs of bfloat16, by oneDNN's kernel for these sizes, as torch's own attention has
// it: packed as they are for dot products, the operands are what it takes.  Returns whether it did.
inline bool multiply_tiles(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t m,
                           int64_t n, int64_t k, bool fresh) {
  try {
    at::native::cpublas::brgemm(m, n, 2 * k, 2 * lda, ldb, ldc, !fresh, reinterpret_cast<const c10::BFloat16*>(a),
                                reinterpret_cast<const c10::BFloat16*>(b), c);
    return true;
  } catch (const c10::Error&) {
    tiles_work = false;
    return false;
  }
}
#endif

// A thread that has multiplied tiles gives their registers back in the end.
struct TilesOfThread {
#if defined(SDPA_REWRITE_TILES)
  ~TilesOfThread() { at::native::cpublas::brgemm_release(); }
#endif
};

// c[m, n] (+)= a[m, k] b[k, n]; n a multiple of W.  a[r, p] is at r * row + p * step.
// Long sums are made of shorter ones, which loses fewer digits.
template <bool DOT>
inline void multiply(const float* a, int64_t row, int64_t step, const float* b, int64_t ldb, float* c, int64_t ldc,
                     int64_t m, int64_t n, int64_t k, const float* alpha, bool fresh) {
#if defined(SDPA_REWRITE_TILES)
  constexpr int64_t tile = 16; // rows
  if (DOT && m >= tile && step == 1 && tiles_work) {
    for (int64_t r = 0; alpha && r < m; ++r) {
      if (alpha[r] != 1.0f) scaled(c + r * ldc, c + r * ldc, n, alpha[r]);
    }
    alpha = nullptr;
    if (multiply_tiles(a, row, b, ldb, c, ldc, m, n, k, fresh)) return;
  }
#endif
  constexpr int64_t most = 64;
  for (int64_t p = 0; p < k; p += most) {
    multiply_some<DOT>(a + p * step, row, step, b + p * ldb, ldb, c, ldc, m, n, std::min(most, k - p),
                       p == 0 ? alpha : nullptr, fresh && p == 0);
  }
}

// How many elements of a row in memory are read at once, and their sum of products with floats.
template <class T>
constexpr int64_t LOT = std::is_same_v<T, float> ? W : 2 * W;

template <class T>
inline V add_products(const float* a, const T* b, V sum) {
  if constexpr (std::is_same_v<T, float>) {
    return at::vec::fmadd(V::loadu(a), V::loadu(b), sum);
  } else {
    const auto [low, high] = at::vec::convert_to_float<T>(Vectorized<T>::loadu(b));
    return at::vec::fmadd(V::loadu(a + W), high, at::vec::fmadd(V::loadu(a), low, sum));
  }
}

// c[r, j] = sum_p a[r, p] b[j, p], j a row of b in memory: for few rows, which are not worth transposing b for.
// Rows are whole lots; rows of c are TILE apart, and 0 is what follows in them up to a whole vector.
template <class T>
inline void multiply_rows(const float* a, int64_t lda, const T* b, int64_t ldb, float* c, int64_t m, int64_t n,
                          int64_t k) {
  constexpr int64_t many = 4;
  for (int64_t r = 0; r < m; ++r, a += lda, c += TILE) {
    int64_t j = 0;
    for (; j + many <= n; j += many) {
      V sum[many];
      for (int64_t x = 0; x < many; ++x) sum[x] = V(0.0f);
      for (int64_t p = 0; p < k; p += LOT<T>) {
        for (int64_t x = 0; x < many; ++x) sum[x] = add_products(a + p, b + (j + x) * ldb + p, sum[x]);
      }
      for (int64_t x = 0; x < many; ++x) c[j + x] = total(sum[x]);
    }
    for (; j < n; ++j) {
      V sum(0.0f);
      for (int64_t p = 0; p < k; p += LOT<T>) sum = add_products(a + p, b + j * ldb + p, sum);
      c[j] = total(sum);
    }
    for (; j < round_up(n, W); ++j) c[j] = 0.0f;
  }
}

// c[r, 0:n] = c[r, 0:n] * alpha[r] + sum_p a[r, p] b[p, 0:n] for a row r, or M of them, TILE apart in a: b as it lies in
// memory, not as floats.  n is a multiple of N vectors.
template <int M, int N, class T>
inline void multiply_lying(const float* a, const T* b, int64_t ldb, float* c, int64_t ldc, int64_t n, int64_t k,
                           const float* alpha) {
  for (int64_t j = 0; j < n; j += N * W) {
    V sum[M][N];
    for (int r = 0; r < M; ++r) for (int x = 0; x < N; ++x) sum[r][x] = V(0.0f);
    for (int64_t p = 0; p < k; ++p) {
      for (int x = 0; x < N; x += 2) {
        const auto [low, high] = at::vec::convert_to_float<T>(Vectorized<T>::loadu(b + p * ldb + j + x * W));
        for (int r = 0; r < M; ++r) {
          const V left(a[r * TILE + p]);
          sum[r][x] = at::vec::fmadd(left, low, sum[r][x]);
          sum[r][x + 1] = at::vec::fmadd(left, high, sum[r][x + 1]);
        }
      }
    }
    for (int r = 0; r < M; ++r) {
      for (int x = 0; x < N; ++x) {
        float* out = c + r * ldc + j + x * W;
        at::vec::fmadd(V::loadu(out), V(alpha[r]), sum[r][x]).store(out);
      }
    }
  }
}

// -- packing ----------------------------------------------------------------------------------------------------

// Words that n elements take along an axis.
template <bool DOT>
inline int64_t words(int64_t n) { return DOT ? (n + 1) / 2 : n; }

// One row, contiguous: out[0:words(n)].
template <bool DOT, class T>
inline void pack_row(const T* src, int64_t stride, int64_t n, float* out) {
  if constexpr (DOT) {
    auto* to = reinterpret_cast<T*>(out);
    if (stride == 1) std::memcpy(to, src, n * sizeof(T));
    else for (int64_t k = 0; k < n; ++k) to[k] = src[k * stride];
    if (n % 2) to[n] = T(0.0f);
  } else if (stride == 1) {
    convert(src, out, n);
  } else {
    for (int64_t k = 0; k < n; ++k) out[k] = to_float(src[k * stride]);
  }
}

// Rows of floats, whole vectors each: `step` apart.
struct FloatRows {
  const float* data;
  int64_t step;
};

// Rows [rows, n] as floats: where they lie if they can be read so, else in `scratch`, zero beyond n.
template <class T>
inline FloatRows float_rows(const T* src, int64_t row, int64_t stride, int64_t rows, int64_t n, float* scratch) {
  if constexpr (std::is_same_v<T, float>) {
    if (stride == 1 && n % W == 0) return {src, row};
  }
  const int64_t wide = round_up(n, W);
  for (int64_t r = 0; r < rows; ++r) {
    pack_row<false>(src + r * row, stride, n, scratch + r * wide);
    std::fill(scratch + r * wide + n, scratch + (r + 1) * wide, 0.0f);
  }
  return {scratch, wide};
}

inline void transpose_square(const float* src, int64_t lds, float* dst, int64_t ldd) {
#if defined(CPU_CAPABILITY_AVX512)
  at::vec::transpose_mxn<float, 16, 16>(src, lds, dst, ldd);
#elif defined(CPU_CAPABILITY_AVX2)
  at::vec::transpose_mxn<float, 8, 8>(src, lds, dst, ldd);
#else
  for (int r = 0; r < W; ++r) for (int c = 0; c < W; ++c) dst[c * ldd + r] = src[r * lds + c];
#endif
}

// Rows of words [rows, n] become [n, TILE]; what lies beyond `rows`, up to whole vectors, is zero.
inline void transpose(const float* src, int64_t lds, int64_t rows, int64_t n, float* dst) {
  int64_t r = 0;
  for (; r + W <= rows; r += W) {
    int64_t c = 0;
    for (; c + W <= n; c += W) transpose_square(src + r * lds + c, lds, dst + c * TILE + r, TILE);
    for (; c < n; ++c) for (int64_t k = r; k < r + W; ++k) dst[c * TILE + k] = src[k * lds + c];
  }
  for (; r < rows; ++r) for (int64_t c = 0; c < n; ++c) dst[c * TILE + r] = src[r * lds + c];
  const int64_t wide = round_up(rows, W);
  if (rows < wide) for (int64_t c = 0; c < n; ++c) for (int64_t k = rows; k < wide; ++k) dst[c * TILE + k] = 0.0f;
}

// Rows [rows, n] as the right operand whose summed axis are the rows: [words(rows), width], zero beyond n and rows.
template <bool DOT, class T>
inline void pack_right(const T* src, int64_t row, int64_t stride, int64_t rows, int64_t n, int64_t width, float* dst) {
  if constexpr (DOT) {
    for (int64_t r = 0; r < rows; r += 2) {
      auto* out = reinterpret_cast<uint32_t*>(dst + r / 2 * width);
      const T* a = src + r * row;
      const T* b = a + row;
      const bool pair = r + 1 < rows;
      int64_t c = 0;
#if defined(CPU_CAPABILITY_AVX512)
      if (stride == 1) {
        for (; c + 16 <= n; c += 16) {
          const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(a + c)));
          const __m512i high = pair ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(b + c)))
                                    : _mm512_setzero_si512();
          _mm512_storeu_si512(out + c, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
      }
#endif
      for (; c < n; ++c) out[c] = word(a[c * stride], pair ? b[c * stride] : T(0.0f));
      for (; c < width; ++c) out[c] = 0;
    }
  } else {
    for (int64_t r = 0; r < rows; ++r) {
      float* out = dst + r * width;
      pack_row<false>(src + r * row, stride, n, out);
      for (int64_t c = n; c < width; ++c) out[c] = 0.0f;
    }
  }
}

// Rows [rows, n] as the right operand whose summed axis is n: [words(n), TILE].  `scratch` holds TILE * words(n).
template <bool DOT, class T>
inline void pack_right_transposed(const T* src, int64_t row, int64_t stride, int64_t rows, int64_t n, float* dst,
                                  float* scratch) {
  const int64_t k = words<DOT>(n);
  for (int64_t r = 0; r < rows; ++r) pack_row<DOT>(src + r * row, stride, n, scratch + r * k);
  transpose(scratch, k, rows, k, dst);
}

// Probabilities or their gradients, as left operands.  Rows: [rows, words(TILE)].
template <bool DOT>
inline void pack_left(const float* tile, int64_t rows, float* out) {
#if defined(SDPA_REWRITE_PAIRS)
  if constexpr (DOT) {
    for (int64_t k = 0; k < rows * TILE; k += 32) {
      const __m512bh x = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(tile + k + 16), _mm512_loadu_ps(tile + k));
      _mm512_storeu_si512(out + k / 2, (__m512i)x);
    }
  }
#endif
}

// The same, transposed: pairs are neighbours along the rows: [words(rows), TILE].
template <bool DOT>
inline void pack_left_transposed(const float* tile, int64_t rows, float* out) {
#if defined(SDPA_REWRITE_PAIRS)
  if constexpr (DOT) {
    for (int64_t r = 0; r < rows; r += 2) {
      for (int64_t c = 0; c < TILE; c += 16) {
        const __m256bh a = _mm512_cvtneps_pbh(_mm512_loadu_ps(tile + r * TILE + c));
        const __m512i low = _mm512_cvtepu16_epi32((__m256i)a);
        __m512i high = _mm512_setzero_si512();
        if (r + 1 < rows) {
          high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(tile + (r + 1) * TILE + c)));
        }
        _mm512_storeu_si512(out + r / 2 * TILE + c, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
      }
    }
  }
#endif
}

} // namespace sdpa_rewrite
