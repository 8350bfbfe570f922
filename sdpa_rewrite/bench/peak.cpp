// Independent chains of multiply-adds on registers.
#include <torch/csrc/inductor/cpp_prefix.h>
#include <ATen/cpu/vec/vec.h>

using V = at::vec::Vectorized<float>;
constexpr int CHAINS = 12; // enough to cover the latency of two units, few enough for sixteen registers

inline V step(V a, V b, V c, bool) { return at::vec::fmadd(a, b, c); }
constexpr int64_t PER_LANE = 2; // a multiplication and an addition

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
struct Pairs {};
inline V step(V a, V b, V c, Pairs) {
  return _mm512_dpbf16_ps(c, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
}
constexpr int64_t PER_LANE_OF_HALVES = 4; // a lane holds a pair
using Halves = Pairs;
#else
constexpr int64_t PER_LANE_OF_HALVES = PER_LANE;
using Halves = bool;
#endif

template <class Kind>
float run(const float* in, int64_t rounds) {
  V sum[CHAINS];
  for (int k = 0; k < CHAINS; ++k) sum[k] = V(in[k]);
  const V a(in[0]), b(in[1]);
  for (int64_t n = 0; n < rounds; ++n) {
#pragma GCC unroll 12
    for (int k = 0; k < CHAINS; ++k) sum[k] = step(a, b, sum[k], Kind{});
  }
  float lanes[V::size()], out = 0;
  for (int k = 0; k < CHAINS; ++k) {
    sum[k].store(lanes);
    out += lanes[0];
  }
  return out;
}

extern "C" void kernel(const float* in, float* out, double* operations, const int64_t rounds, const int64_t halves)
{
  const int threads = omp_get_max_threads();
#pragma omp parallel num_threads(threads)
  {
    out[omp_get_thread_num()] = halves ? run<Halves>(in, rounds) : run<bool>(in, rounds);
  }
  operations[0] = double(rounds) * CHAINS * V::size() * threads * (halves ? PER_LANE_OF_HALVES : PER_LANE);
}
