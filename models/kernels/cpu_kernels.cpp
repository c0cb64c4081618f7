#include "models/kernels/cpu_kernels.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel/copies/float_formats.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3")  // -O2 of GCC 12 vectorises next to nothing
#endif

namespace megashard::kernels {
namespace {

constexpr int kLanes = 16;           // running sums side by side: what lets the compiler vectorise a sum
constexpr int64_t kGrain = 1 << 15;  // elements a thread takes at least

[[gnu::always_inline]] inline float load(float value) { return value; }
[[gnu::always_inline]] inline float load(c10::BFloat16 value) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(value.x) << 16);
}
[[gnu::always_inline]] inline float load(c10::Half value) { return to_float(HalfBits{value.x}); }

template <class T>
[[gnu::always_inline]] inline T store(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else if constexpr (std::is_same_v<T, c10::Half>) {
    HalfBits half{};
    round_to(half, value);
    return c10::Half(half.bits, c10::Half::from_bits());
  } else {
    const auto bits = __builtin_bit_cast(uint32_t, value);
    const uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;  // to nearest even
    const uint32_t nan = 0x7FC0U;
    return c10::BFloat16(static_cast<uint16_t>(value != value ? nan : rounded), c10::BFloat16::from_bits());
  }
}

/// exp to 2 ulp in [-86, 88], clamped outside; NaN stays NaN. 2^n times a polynomial on [-ln 2 / 2,
/// ln 2 / 2].
[[gnu::always_inline]] inline float fast_exp(float x) {
  x = x > 88.0F ? 88.0F : x;
  x = x < -86.0F ? -86.0F : x;
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer, left in the low bits
  const float shifted = x * 1.44269504F + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375F) + n * 2.12194440e-4F;
  float p = 1.9875691500e-4F;
  p = p * r + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  p = p * r * r + r + 1.0F;
  const auto scaled = __builtin_bit_cast(uint32_t, p) + (__builtin_bit_cast(uint32_t, shifted) << 23);
  return __builtin_bit_cast(float, scaled);
}

[[gnu::always_inline]] inline float sum_lanes(const float* lanes) {
  float sums[kLanes];
  for (int l = 0; l < kLanes; ++l) sums[l] = lanes[l];
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) sums[l] += sums[l + half];
  }
  return sums[0];
}

// One instance of a kernel for each instruction set: the always-inline body is compiled into each
// of these.
#if defined(__x86_64__)
template <class Kernel, class... Args>
[[gnu::target("avx512f")]] void run_avx512(Args... args) {
  Kernel::run(args...);
}
template <class Kernel, class... Args>
[[gnu::target("avx2,fma")]] void run_avx2(Args... args) {
  Kernel::run(args...);
}
#endif

template <class Kernel, class... Args>
void run_best(Args... args) {
#if defined(__x86_64__)
  static const bool avx512 = __builtin_cpu_supports("avx512f") != 0;
  static const bool avx2 = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
  if (avx512) return run_avx512<Kernel>(args...);
  if (avx2) return run_avx2<Kernel>(args...);
#endif
  Kernel::run(args...);
}

template <class Body>
void for_rows(int64_t rows, int64_t width, const Body& body) {
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width)), body);
}

template <class T>
struct RmsNorm {
  [[gnu::always_inline]] static inline void run(const T* x, const T* weight, T* y, float* inverse_rms, int64_t rows,
                                                int64_t width, float eps) {
    for (int64_t row = 0; row < rows; ++row, x += width, y += width) {
      float lanes[kLanes] = {};
      int64_t j = 0;
      for (; j + kLanes <= width; j += kLanes) {
        for (int l = 0; l < kLanes; ++l) lanes[l] += load(x[j + l]) * load(x[j + l]);
      }
      float sum = sum_lanes(lanes);
      for (; j < width; ++j) sum += load(x[j]) * load(x[j]);
      const float scale = 1.0F / std::sqrt(sum / static_cast<float>(width) + eps);
      inverse_rms[row] = scale;
      for (j = 0; j < width; ++j) y[j] = store<T>(load(weight[j]) * load(store<T>(load(x[j]) * scale)));
    }
  }
};

template <class T>
struct RmsNormBackward {
  [[gnu::always_inline]] static inline void run(const T* grad_y, const T* x, const T* weight, const float* inverse_rms,
                                                T* grad_x, float* grad_weight, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; ++row, x += width, grad_y += width, grad_x += width) {
      const float scale = inverse_rms[row];
      float lanes[kLanes] = {};
      int64_t j = 0;
      for (; j + kLanes <= width; j += kLanes) {
        for (int l = 0; l < kLanes; ++l) lanes[l] += load(grad_y[j + l]) * load(weight[j + l]) * load(x[j + l]);
      }
      float dot = sum_lanes(lanes);
      for (; j < width; ++j) dot += load(grad_y[j]) * load(weight[j]) * load(x[j]);
      const float along = dot * scale * scale * scale / static_cast<float>(width);
      for (j = 0; j < width; ++j) {
        grad_x[j] = store<T>(load(grad_y[j]) * load(weight[j]) * scale - along * load(x[j]));
      }
      if (grad_weight == nullptr) continue;
      for (j = 0; j < width; ++j) grad_weight[j] += load(grad_y[j]) * load(store<T>(load(x[j]) * scale));
    }
  }
};

template <class T>
struct Rotate {
  [[gnu::always_inline]] static inline void run(const T* x, const T* cos, const T* sin, T* y, const RotaryShape* shape,
                                                float sign, int64_t begin, int64_t end) {
    const int64_t half = shape->rotary_dim / 2;
    const int64_t heads = shape->heads;
    const int64_t head_dim = shape->head_dim;
    for (int64_t row = begin; row < end; ++row) {  // row = b * length + t
      const int64_t b = row / shape->length;
      const int64_t t = row % shape->length;
      const T* c = cos + (shape->table_per_batch ? row : t) * half;
      const T* s = sin + (shape->table_per_batch ? row : t) * half;
      for (int64_t head = 0; head < heads; ++head) {
        const T* from = x + b * shape->stride_batch + t * shape->stride_time + head * shape->stride_head;
        T* to = y + (row * heads + head) * head_dim;
        for (int64_t i = 0; i < half; ++i) {
          const float first = load(from[i]);
          const float second = load(from[i + half]);
          const float sine = sign * load(s[i]);
          to[i] = store<T>(first * load(c[i]) - second * sine);
          to[i + half] = store<T>(second * load(c[i]) + first * sine);
        }
        for (int64_t i = 2 * half; i < head_dim; ++i) to[i] = from[i];
      }
    }
  }
};

template <class T>
struct Swiglu {
  [[gnu::always_inline]] static inline void run(const T* gate, const T* up, T* y, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const float g = load(gate[i]);
      y[i] = store<T>(load(store<T>(g / (1.0F + fast_exp(-g)))) * load(up[i]));
    }
  }
};

template <class T>
struct SwigluBackward {
  [[gnu::always_inline]] static inline void run(const T* grad_y, const T* gate, const T* up, T* grad_gate, T* grad_up,
                                                int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const float g = load(gate[i]);
      const float dy = load(grad_y[i]);
      const float sigmoid = 1.0F / (1.0F + fast_exp(-g));
      grad_up[i] = store<T>(dy * load(store<T>(g * sigmoid)));
      grad_gate[i] = store<T>(dy * load(up[i]) * sigmoid * (1.0F + g * (1.0F - sigmoid)));
    }
  }
};

template <class T>
struct CrossEntropy {
  [[gnu::always_inline]] static inline void run(const T* logits, const int64_t* labels, float* loss, float* stats,
                                                int64_t rows, int64_t width) {
    constexpr int64_t kBlock = 1024;  // partial sums go to a double before fp32 loses digits
    for (int64_t row = 0; row < rows; ++row, logits += width) {
      float largest = -INFINITY;
      float tops[kLanes];
      for (int l = 0; l < kLanes; ++l) tops[l] = -INFINITY;
      int64_t j = 0;
      for (; j + kLanes <= width; j += kLanes) {
        for (int l = 0; l < kLanes; ++l) {
          const float value = load(logits[j + l]);
          tops[l] = value > tops[l] ? value : tops[l];
        }
      }
      for (int l = 0; l < kLanes; ++l) largest = tops[l] > largest ? tops[l] : largest;
      for (; j < width; ++j) largest = load(logits[j]) > largest ? load(logits[j]) : largest;

      double sum = 0;
      for (int64_t block = 0; block < width; block += kBlock) {
        const int64_t stop = block + kBlock < width ? block + kBlock : width;
        float lanes[kLanes] = {};
        int64_t i = block;
        for (; i + kLanes <= stop; i += kLanes) {
          for (int l = 0; l < kLanes; ++l) lanes[l] += fast_exp(load(logits[i + l]) - largest);
        }
        for (; i < stop; ++i) lanes[0] += fast_exp(load(logits[i]) - largest);
        sum += sum_lanes(lanes);
      }
      const auto log_sum = static_cast<float>(std::log(sum));
      stats[2 * row] = largest;
      stats[2 * row + 1] = log_sum;
      loss[row] = labels[row] < 0 ? 0.0F : log_sum - (load(logits[labels[row]]) - largest);
    }
  }
};

template <class T>
struct CrossEntropyBackward {
  [[gnu::always_inline]] static inline void run(T* logits, const int64_t* labels, const float* stats,
                                                const float* grad_loss, int64_t rows, int64_t width,
                                                int64_t ignore_index) {
    for (int64_t row = 0; row < rows; ++row, logits += width) {
      if (labels[row] == ignore_index) {
        for (int64_t j = 0; j < width; ++j) logits[j] = store<T>(0.0F);
        continue;
      }
      const float largest = stats[2 * row];
      const float log_sum = stats[2 * row + 1];
      const float scale = grad_loss[row];
      const int64_t label = labels[row];
      const float at_label = label < 0 ? 0.0F : fast_exp((load(logits[label]) - largest) - log_sum) - 1.0F;
      for (int64_t j = 0; j < width; ++j) {
        logits[j] = store<T>(scale * fast_exp((load(logits[j]) - largest) - log_sum));
      }
      if (label >= 0) logits[label] = store<T>(scale * at_label);
    }
  }
};

}  // namespace

template <class T>
void rms_norm(const T* x, const T* weight, T* y, float* inverse_rms, int64_t rows, int64_t width, float eps) {
  for_rows(rows, width, [=](int64_t begin, int64_t end) {
    run_best<RmsNorm<T>>(x + begin * width, weight, y + begin * width, inverse_rms + begin, end - begin, width, eps);
  });
}

template <class T>
void rms_norm_backward(const T* grad_y, const T* x, const T* weight, const float* inverse_rms, T* grad_x,
                       float* grad_weight, int64_t rows, int64_t width) {
  std::vector<float> partial;  // [threads, width], added in thread order: the same threads give the same bits
  const int64_t threads = at::get_num_threads();
  if (grad_weight != nullptr) partial.assign(static_cast<size_t>(threads * width), 0.0F);
  float* const sums = grad_weight == nullptr ? nullptr : partial.data();
  for_rows(rows, width, [=](int64_t begin, int64_t end) {
    float* const own = sums == nullptr ? nullptr : sums + at::get_thread_num() * width;
    run_best<RmsNormBackward<T>>(grad_y + begin * width, x + begin * width, weight, inverse_rms + begin,
                                 grad_x + begin * width, own, end - begin, width);
  });
  if (grad_weight == nullptr) return;
  std::copy_n(partial.data(), width, grad_weight);
  for (int64_t thread = 1; thread < threads; ++thread) {
    for (int64_t j = 0; j < width; ++j) grad_weight[j] += partial[static_cast<size_t>(thread * width + j)];
  }
}

template <class T>
void rotate(const T* x, const T* cos, const T* sin, T* y, const RotaryShape& shape, bool back) {
  for_rows(shape.batch * shape.length, shape.heads * shape.head_dim, [&](int64_t begin, int64_t end) {
    run_best<Rotate<T>>(x, cos, sin, y, &shape, back ? -1.0F : 1.0F, begin, end);
  });
}

template <class T>
void swiglu(const T* gate, const T* up, T* y, int64_t count) {
  for_rows(count, 1,
           [=](int64_t begin, int64_t end) { run_best<Swiglu<T>>(gate + begin, up + begin, y + begin, end - begin); });
}

template <class T>
void swiglu_backward(const T* grad_y, const T* gate, const T* up, T* grad_gate, T* grad_up, int64_t count) {
  for_rows(count, 1, [=](int64_t begin, int64_t end) {
    run_best<SwigluBackward<T>>(grad_y + begin, gate + begin, up + begin, grad_gate + begin, grad_up + begin,
                                end - begin);
  });
}

template <class T>
void cross_entropy(const T* logits, const int64_t* labels, float* loss, float* stats, int64_t rows, int64_t width) {
  for_rows(rows, width, [=](int64_t begin, int64_t end) {
    run_best<CrossEntropy<T>>(logits + begin * width, labels + begin, loss + begin, stats + 2 * begin, end - begin,
                              width);
  });
}

template <class T>
void cross_entropy_backward_(T* logits, const int64_t* labels, const float* stats, const float* grad_loss, int64_t rows,
                             int64_t width, int64_t ignore_index) {
  for_rows(rows, width, [=](int64_t begin, int64_t end) {
    run_best<CrossEntropyBackward<T>>(logits + begin * width, labels + begin, stats + 2 * begin, grad_loss + begin,
                                      end - begin, width, ignore_index);
  });
}

#define MEGASHARD_INSTANTIATE(T)                                                                             \
  template void rms_norm(const T*, const T*, T*, float*, int64_t, int64_t, float);                           \
  template void rms_norm_backward(const T*, const T*, const T*, const float*, T*, float*, int64_t, int64_t); \
  template void rotate(const T*, const T*, const T*, T*, const RotaryShape&, bool);                          \
  template void swiglu(const T*, const T*, T*, int64_t);                                                     \
  template void swiglu_backward(const T*, const T*, const T*, T*, T*, int64_t);                              \
  template void cross_entropy(const T*, const int64_t*, float*, float*, int64_t, int64_t);                   \
  template void cross_entropy_backward_(T*, const int64_t*, const float*, const float*, int64_t, int64_t, int64_t)
MEGASHARD_INSTANTIATE(float);
MEGASHARD_INSTANTIATE(c10::BFloat16);
MEGASHARD_INSTANTIATE(c10::Half);
#undef MEGASHARD_INSTANTIATE

}  // namespace megashard::kernels
