// Matrix products of a few rows: each weight is read once, where it lies, and no copy of it is made in another order.
// Plain C++ with the compiler's own vectors; bf16 dot products of the processor where it has them.
//
// Letters: M rows; N outputs; K inputs; T tokens; A experts per token; E experts; D hidden width; I inner width.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;
constexpr int kPair = 2 * kLanes;
constexpr int kRows = 8;        // rows of x that share a weight in registers
constexpr int64_t kBlock = 64;  // outputs per task: long runs of memory, and work for many threads

typedef float Vec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes), aligned(2), may_alias));

struct Bf16 {
  uint16_t bits;
};

inline float one(float x) { return x; }
inline float one(Bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

// To nearest, ties to even, as torch rounds.
inline void put(float x, float* at) { *at = x; }
inline void put(float x, Bf16* at) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  at->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
template <typename T>
inline float rounded(float x) {
  T narrow;
  put(x, &narrow);
  return one(narrow);
}

inline float sum(Vec x) {
  x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15);
  x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7);
  x += __builtin_shufflevector(x, x, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3);
  return x[0] + x[1];
}

// 32 elements at a time, added to 16 partial sums.
struct Wide {
  Vec a, b;
};
inline Wide load(const float* at) {
  return {*reinterpret_cast<const Vec*>(at), *reinterpret_cast<const Vec*>(at + kLanes)};
}
inline Vec add_product(Vec acc, const Wide& x, const Wide& w) { return acc + x.a * w.a + x.b * w.b; }
#ifdef __AVX512BF16__
inline __m512bh load(const Bf16* at) { return (__m512bh)_mm512_loadu_si512(at); }
inline Vec add_product(Vec acc, __m512bh x, __m512bh w) { return (Vec)_mm512_dpbf16_ps((__m512)acc, x, w); }
#else
// The even and the odd elements, of x as of w.
inline Wide load(const Bf16* at) {
  const Bits both = *reinterpret_cast<const Bits*>(at);
  return {reinterpret_cast<Vec>(both << 16), reinterpret_cast<Vec>(both & 0xffff0000u)};
}
#endif

// out[r] = x[r] . w, in an order that depends on K alone. One weight row after the other, front to back: that is how
// memory is read fastest.
template <int R, typename T>
inline void dots(const T* const* x, const T* w, int64_t K, float* out) {
  Vec acc[R][2] = {};
  int64_t k = 0;
  for (; k + 2 * kPair <= K; k += 2 * kPair) {
    const auto first = load(w + k), second = load(w + k + kPair);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      acc[r][0] = add_product(acc[r][0], load(x[r] + k), first);
      acc[r][1] = add_product(acc[r][1], load(x[r] + k + kPair), second);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    float rest = 0;
    for (int64_t i = k; i < K; ++i) rest += one(x[r][i]) * one(w[i]);
    out[r] = sum(acc[r][0] + acc[r][1]) + rest;
  }
}

template <typename T>
__attribute__((noinline)) void dots(int rows, const T* const* x, const T* w, int64_t K, float* out) {
  switch (rows) {
    case 1: return dots<1>(x, w, K, out);
    case 2: return dots<2>(x, w, K, out);
    case 3: return dots<3>(x, w, K, out);
    case 4: return dots<4>(x, w, K, out);
    case 5: return dots<5>(x, w, K, out);
    case 6: return dots<6>(x, w, K, out);
    case 7: return dots<7>(x, w, K, out);
    default: return dots<kRows>(x, w, K, out);
  }
}

// take(row, output, value) for all rows against the weights [first, stop) of w [.., K].
template <typename T, typename Take>
inline void product(const T* const* x, int64_t rows, const T* w, int64_t first, int64_t stop, int64_t K, Take take) {
  for (int64_t n = first; n < stop; ++n)
    for (int64_t r = 0; r < rows; r += kRows) {
      const int some = int(std::min<int64_t>(kRows, rows - r));
      float out[kRows];
      dots(some, x + r, w + n * K, K, out);
      for (int j = 0; j < some; ++j) take(r + j, n, out[j]);
    }
}

template <typename T>
void linear(int64_t M, int64_t N, int64_t K, const T* x, const T* w, T* out) {
  std::vector<const T*> rows(M);
  for (int64_t m = 0; m < M; ++m) rows[m] = x + m * K;
  const int64_t tasks = (N + kBlock - 1) / kBlock;
#pragma omp parallel for schedule(static)
  for (int64_t task = 0; task < tasks; ++task)
    product(rows.data(), M, w, task * kBlock, std::min(N, (task + 1) * kBlock), K,
            [&](int64_t m, int64_t n, float value) { put(value, out + m * N + n); });
}

struct Group {
  int64_t expert, first, count;  // of the sorted pairs of token and expert
};

template <typename T>
void experts(int64_t tokens, int64_t A, int64_t E, int64_t D, int64_t I, const T* x, const int64_t* choice,
             const float* share, const T* gate_up, const T* down, T* out) {
  const int64_t pairs = tokens * A;
  std::vector<int64_t> order(pairs), starts(E + 1, 0);
  for (int64_t i = 0; i < pairs; ++i) ++starts[choice[i] + 1];
  std::vector<Group> groups;
  for (int64_t e = 0; e < E; ++e) {
    if (starts[e + 1]) groups.push_back({e, starts[e], starts[e + 1]});
    starts[e + 1] += starts[e];
  }
  for (int64_t i = 0; i < pairs; ++i) order[starts[choice[i]]++] = i;
  std::vector<const T*> rows(pairs), inner_rows(pairs);
  std::vector<T> inner(pairs * I);
  for (int64_t j = 0; j < pairs; ++j) {
    rows[j] = x + order[j] / A * D;
    inner_rows[j] = inner.data() + j * I;
  }
  const int64_t inner_blocks = (I + kBlock - 1) / kBlock, blocks = (D + kBlock - 1) / kBlock;
  const int64_t tasks = int64_t(groups.size()) * inner_blocks;
#pragma omp parallel
  {
    std::vector<float> gates(pairs * kBlock), parts(pairs * kBlock);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < tasks; ++task) {
      const Group& group = groups[task / inner_blocks];
      const int64_t first = task % inner_blocks * kBlock, stop = std::min(I, first + kBlock);
      const T* w = gate_up + group.expert * 2 * I * D;
      product(rows.data() + group.first, group.count, w, first, stop, D,
              [&](int64_t r, int64_t i, float value) { gates[r * kBlock + i - first] = rounded<T>(value); });
      product(rows.data() + group.first, group.count, w + I * D, first, stop, D,
              [&](int64_t r, int64_t i, float value) {
                const float gate = gates[r * kBlock + i - first];
                const float active = rounded<T>(gate / (1.0f + std::exp(-gate)));
                put(active * rounded<T>(value), inner.data() + (group.first + r) * I + i);
              });
    }
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = block * kBlock, stop = std::min(D, first + kBlock);
      for (const Group& group : groups)
        product(inner_rows.data() + group.first, group.count, down + group.expert * D * I, first, stop, I,
                [&](int64_t r, int64_t d, float value) {
                  parts[order[group.first + r] * kBlock + d - first] = rounded<T>(value);
                });
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t d = first; d < stop; ++d) {
          float total = 0;
          for (int64_t a = 0; a < A; ++a) total += share[t * A + a] * parts[(t * A + a) * kBlock + d - first];
          put(total, out + t * D + d);
        }
    }
  }
}

}  // namespace

extern "C" void mimo_few_linear(int is_bf16, int64_t M, int64_t N, int64_t K, const void* x, const void* w, void* out) {
  if (is_bf16)
    linear(M, N, K, static_cast<const Bf16*>(x), static_cast<const Bf16*>(w), static_cast<Bf16*>(out));
  else
    linear(M, N, K, static_cast<const float*>(x), static_cast<const float*>(w), static_cast<float*>(out));
}

extern "C" void mimo_few_experts(int is_bf16, int64_t tokens, int64_t A, int64_t E, int64_t D, int64_t I,
                                 const void* x, const int64_t* choice, const float* share, const void* gate_up,
                                 const void* down, void* out) {
  if (is_bf16)
    experts(tokens, A, E, D, I, static_cast<const Bf16*>(x), choice, share, static_cast<const Bf16*>(gate_up),
            static_cast<const Bf16*>(down), static_cast<Bf16*>(out));
  else
    experts(tokens, A, E, D, I, static_cast<const float*>(x), choice, share, static_cast<const float*>(gate_up),
            static_cast<const float*>(down), static_cast<float*>(out));
}
