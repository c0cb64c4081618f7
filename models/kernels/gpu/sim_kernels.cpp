// Part of libmegashard_sim.so: the row kernels as operations on the current stream of the simulated device, with
// declared reads and writes. They run as host_kernels() on the memory behind the device's addresses.

#include "models/kernels/gpu/cross_entropy_grad_rows.h"
#include "models/kernels/gpu/gpu_kernels.h"
#include "models/kernels/gpu/head_norm_grad_rows.h"
#include "models/kernels/gpu/head_norm_rows.h"
#include "models/kernels/gpu/rms_norm_grad_rows.h"
#include "models/kernels/gpu/rotary_threads.h"
#include "models/kernels/gpu/swiglu_threads.h"
#include "parallel/sim/arena.h"
#include "parallel/sim/operation.h"

namespace megashard::gpu {
namespace {

/// A launch being enqueued: declares each array and replaces its address by the host's.
class Enqueued {
 public:
  Enqueued(const char* name, FloatFormat format) : operation_(sim::SimDevice::at(sim::current_device()), name) {
    operation_.has_elements_of(size_of(format));
  }

  template <class T>
  void reads(T*& array, int64_t bytes) {
    if (bytes > 0) operation_.reads(array, static_cast<size_t>(bytes));
    to_host(array);
  }
  template <class T>
  void writes(T*& array, int64_t bytes) {
    if (bytes > 0) operation_.writes(array, static_cast<size_t>(bytes));
    to_host(array);
  }
  /// Declares `count` parts of `bytes` bytes, `distance` apart.
  void reads_parts(const void* array, int64_t bytes, int64_t count, int64_t distance) {
    for (int64_t i = 0; i < count; ++i)
      operation_.reads(static_cast<const char*>(array) + i * distance, static_cast<size_t>(bytes));
  }
  void writes_parts(const void* array, int64_t bytes, int64_t count, int64_t distance) {
    for (int64_t i = 0; i < count; ++i)
      operation_.writes(static_cast<const char*>(array) + i * distance, static_cast<size_t>(bytes));
  }
  template <class T>
  void to_host(T*& array) const {
    if (array != nullptr) array = reinterpret_cast<T*>(sim::Arena::get().reachable(array));
  }
  template <class Launch>
  void run(void (*kernel)(const Launch&), const Launch& launch) {
    operation_.run([kernel, launch] { kernel(launch); });
  }

 private:
  sim::Operation operation_;
};

void rms_norm(const RmsNormRows& asked) {
  RmsNormRows launch = asked;
  const int64_t row = launch.width * size_of(launch.format);
  Enqueued enqueued("rms_norm_kernel", launch.format);
  enqueued.reads(launch.x, launch.rows * row);
  enqueued.reads(launch.branch, launch.branch == nullptr ? 0 : launch.rows * row);
  enqueued.writes(launch.sum, launch.sum == nullptr ? 0 : launch.rows * row);
  enqueued.reads(launch.weight, row);
  enqueued.writes(launch.y, launch.rows * row);
  enqueued.writes(launch.inverse_rms, 4 * launch.rows);
  enqueued.run(host_kernels().rms_norm, launch);
}

void rms_norm_grad(const RmsNormGradRows& asked) {
  RmsNormGradRows launch = asked;
  const int64_t row = launch.width * size_of(launch.format);
  Enqueued enqueued("rms_norm_grad_kernel", launch.format);
  enqueued.reads(launch.grad_y, launch.rows * row);
  enqueued.reads(launch.x, launch.rows * row);
  enqueued.reads(launch.weight, row);
  enqueued.reads(launch.inverse_rms, 4 * launch.rows);
  enqueued.reads(launch.grad_sum, launch.grad_sum == nullptr ? 0 : launch.rows * row);
  enqueued.writes(launch.grad_x, launch.rows * row);
  enqueued.writes(launch.partial, launch.partial == nullptr ? 0 : 4 * launch.groups * launch.width);
  enqueued.writes(launch.grad_weight, launch.grad_weight == nullptr ? 0 : 4 * launch.width);
  enqueued.run(host_kernels().rms_norm_grad, launch);
}

/// Declares reads of heads (possibly strided), tables and the weight.
template <class Launch>
void reads_heads(Enqueued& enqueued, Launch& launch) {
  const HeadShape& shape = launch.shape;
  const int64_t size = size_of(shape.format);
  for (int64_t token = 0; token < shape.tokens; ++token)
    enqueued.reads_parts(static_cast<const char*>(launch.x) + place_of_head(shape, token * shape.heads) * size,
                         shape.head_dim * size, shape.heads, shape.stride_head * size);
  enqueued.to_host(launch.x);
  const int64_t table = (shape.table_per_batch ? shape.tokens : shape.length) * shape.half * size;
  enqueued.reads(launch.cos, table);
  enqueued.reads(launch.sin, table);
  enqueued.reads(launch.weight, shape.head_dim * size);
}

void head_norm(const HeadNormRows& asked) {
  HeadNormRows launch = asked;
  const int64_t rows = head_rows(launch.shape);
  Enqueued enqueued("head_norm_kernel", launch.shape.format);
  reads_heads(enqueued, launch);
  enqueued.writes(launch.y, rows * launch.shape.head_dim * size_of(launch.shape.format));
  enqueued.writes(launch.inverse_rms, 4 * rows);
  enqueued.run(host_kernels().head_norm, launch);
}

void head_norm_grad(const HeadNormGradRows& asked) {
  HeadNormGradRows launch = asked;
  const int64_t rows = head_rows(launch.shape), width = launch.shape.head_dim;
  Enqueued enqueued("head_norm_grad_kernel", launch.shape.format);
  reads_heads(enqueued, launch);
  enqueued.reads(launch.grad_y, rows * width * size_of(launch.shape.format));
  enqueued.reads(launch.inverse_rms, 4 * rows);
  enqueued.writes(launch.grad_x, rows * width * size_of(launch.shape.format));
  enqueued.writes(launch.partial, launch.partial == nullptr ? 0 : 4 * launch.groups * width);
  enqueued.writes(launch.grad_weight, launch.grad_weight == nullptr ? 0 : 4 * width);
  enqueued.run(host_kernels().head_norm_grad, launch);
}

void swiglu(const SwigluElements& asked) {
  SwigluElements launch = asked;
  const auto [rows, width, stride] = launch.shape;
  const int64_t size = size_of(launch.format);
  Enqueued enqueued("swiglu_kernel", launch.format);
  for (const void** from : {&launch.gate, &launch.up}) {
    enqueued.reads_parts(*from, width * size, rows, stride * size);
    enqueued.to_host(*from);
  }
  enqueued.writes(launch.y, rows * width * size);
  enqueued.run(host_kernels().swiglu, launch);
}

void swiglu_grad(const SwigluGradElements& asked) {
  SwigluGradElements launch = asked;
  const auto [rows, width, stride] = launch.shape;
  const int64_t size = size_of(launch.format);
  Enqueued enqueued("swiglu_grad_kernel", launch.format);
  enqueued.reads(launch.grad_y, rows * width * size);
  for (const void** from : {&launch.gate, &launch.up}) {
    enqueued.reads_parts(*from, width * size, rows, stride * size);
    enqueued.to_host(*from);
  }
  for (void** to : {&launch.grad_gate, &launch.grad_up}) {
    enqueued.writes_parts(*to, width * size, rows, stride * size);
    enqueued.to_host(*to);
  }
  enqueued.writes(launch.y, launch.y == nullptr ? 0 : rows * width * size);
  enqueued.run(host_kernels().swiglu_grad, launch);
}

void rotate(const RotaryTokens& asked) {
  RotaryTokens launch = asked;
  const int64_t size = size_of(launch.format), tokens = launch.batch * launch.length;
  const int64_t table = (launch.table_per_batch ? tokens : launch.length) * launch.half * size;
  Enqueued enqueued("rotate_kernel", launch.format);
  /// Calls touch(array, bytes, count, distance) for the heads of each token.
  const auto of_tokens = [&](const void* array, const HeadStrides& strides, const auto& touch) {
    const int64_t heads_at_once = strides.head == launch.head_dim ? launch.heads : 1;
    for (int64_t token = 0; token < tokens; ++token) {
      const int64_t first = token / launch.length * strides.batch + token % launch.length * strides.time;
      touch(static_cast<const char*>(array) + first * size, heads_at_once * launch.head_dim * size,
            launch.heads / heads_at_once, strides.head * size);
    }
  };
  of_tokens(launch.x, launch.of_x, [&](auto... parts) { enqueued.reads_parts(parts...); });
  of_tokens(launch.y, launch.of_y, [&](auto... parts) { enqueued.writes_parts(parts...); });
  enqueued.to_host(launch.x);
  enqueued.to_host(launch.y);
  enqueued.reads(launch.cos, table);
  enqueued.reads(launch.sin, table);
  enqueued.run(host_kernels().rotate, launch);
}

void cross_entropy(const CrossEntropyRows& asked) {
  CrossEntropyRows launch = asked;
  Enqueued enqueued("cross_entropy_kernel", launch.format);
  enqueued.reads(launch.logits, launch.rows * launch.width * size_of(launch.format));
  enqueued.reads(launch.labels, 8 * launch.rows);
  enqueued.writes(launch.loss, 4 * launch.rows);
  enqueued.writes(launch.stats, 8 * launch.rows);
  enqueued.run(host_kernels().cross_entropy, launch);
}

void cross_entropy_grad(const CrossEntropyGradRows& asked) {
  CrossEntropyGradRows launch = asked;
  Enqueued enqueued("cross_entropy_grad_kernel", launch.format);
  enqueued.writes(launch.logits, launch.rows * launch.width * size_of(launch.format));
  enqueued.reads(launch.labels, 8 * launch.rows);
  enqueued.reads(launch.stats, 8 * launch.rows);
  enqueued.reads(launch.grad_loss, 4 * launch.rows);
  enqueued.run(host_kernels().cross_entropy_grad, launch);
}

[[maybe_unused]] const bool set = [] {
  set_gpu_kernels({.rms_norm = rms_norm,
                   .rms_norm_grad = rms_norm_grad,
                   .head_norm = head_norm,
                   .head_norm_grad = head_norm_grad,
                   .swiglu = swiglu,
                   .swiglu_grad = swiglu_grad,
                   .rotate = rotate,
                   .cross_entropy = cross_entropy,
                   .cross_entropy_grad = cross_entropy_grad,
                   .has_grouped_products = [] { return true; }});
  return true;
}();

}  // namespace
}  // namespace megashard::gpu
