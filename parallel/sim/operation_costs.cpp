#include "parallel/sim/operation_costs.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <unordered_map>

#include "parallel/sim/settings.h"

namespace megashard::sim {
namespace {

using at::Tensor;
using torch::jit::Stack;

double peak_of(const Tensor& factor) {
  const DeviceModel& model = settings().model;
  return factor.element_size() == 1 ? model.flops_8 : factor.element_size() == 2 ? model.flops_16 : model.flops_32;
}

/// Part of the peak for [m, k] x [k, n]: the best tile and split of the depth, with waves of tiles that do not fill all
/// multiprocessors. Tiles, their rates and a tile's start cost in depth come from tests/benchmarks/forecast.py.
double product_share(double m, double n, double k) {
  struct Tile {
    double rows, columns, rate;
  };
  constexpr std::array tiles = {Tile{128, 256, 1.0}, Tile{256, 128, 1.0}, Tile{128, 128, 0.9}};
  constexpr std::array pieces = {1.0, 2.0, 4.0, 8.0};
  constexpr double kTileStart = 256;
  const auto processors = static_cast<double>(settings().model.multiprocessors);
  double best = 0;
  for (const Tile& tile : tiles) {
    for (const double split : pieces) {
      const double blocks = std::ceil(m / tile.rows) * std::ceil(n / tile.columns) * split;
      const double waves = std::ceil(blocks / processors);
      const double busy = m * n * split / (tile.rows * tile.columns * waves * processors);
      best = std::max(best, tile.rate * busy * k / split / (k / split + kTileStart));
    }
  }
  return settings().model.product_share * best;
}

/// The measured sizes next to a size, and its fraction of the way from the first to the second.
struct Between {
  int64_t low = 0, high = 0;
  double share = 0;
};

Between neighbours(std::vector<int64_t> sizes, double size) {
  std::ranges::sort(sizes);
  const auto above = std::ranges::find_if(sizes, [&](int64_t each) { return static_cast<double>(each) >= size; });
  if (above == sizes.begin()) return {sizes.front(), sizes.front(), 0};
  if (above == sizes.end()) return {sizes.back(), sizes.back(), 0};
  const int64_t low = *std::prev(above), high = *above;
  return {low, high,
          std::log(size / static_cast<double>(low)) / std::log(static_cast<double>(high) / static_cast<double>(low))};
}

/// Interpolates the rates of the eight measured products around this one, in logarithms of sizes; 0 if none have `bits`
/// bits.
double measured_flops(int64_t bits, double m, double n, double k) {
  const auto& products = settings().model.products;
  const auto around = [&](double size, int64_t DeviceModel::Product::*side) {
    std::vector<int64_t> sizes;
    for (const auto& each : products) {
      if (each.bits == bits) sizes.push_back(each.*side);
    }
    return sizes.empty() ? Between{} : neighbours(sizes, size);
  };
  using Product = DeviceModel::Product;
  const Between rows = around(m, &Product::m), columns = around(n, &Product::n), depth = around(k, &Product::k);
  const auto weight = [](const Between& between, int64_t size) {
    return (size == between.low ? 1 - between.share : 0) + (size == between.high ? between.share : 0);
  };
  double seconds = 0;  // per FLOP
  for (const auto& each : products) {
    if (each.bits != bits) continue;
    const double part = weight(rows, each.m) * weight(columns, each.n) * weight(depth, each.k);
    seconds += part / each.flops;
  }
  return seconds > 0 ? 1 / seconds : 0;
}

/// [batches, m, k] x [batches, k, n]; grouped rows count as one product: [m, k] x [groups, k, n].
double product_seconds(const Tensor& a, const Tensor& b) {
  const auto batches = static_cast<double>(a.dim() == 3 ? a.size(0) : 1);
  const auto m = static_cast<double>(a.size(-2)), k = static_cast<double>(a.size(-1));
  const auto n = static_cast<double>(b.size(-1));
  if (batches * m * k * n == 0) return 0;
  const auto bits = static_cast<int64_t>(8 * a.element_size());
  if (const double rate = measured_flops(bits, m, n, k); rate > 0) return 2 * batches * m * n * k / rate;
  return 2 * batches * m * n * k / (peak_of(a) * product_share(batches * m, n, k));
}

constexpr double kAttentionStart = 512;     // in keys
constexpr double kBackwardOfForward = 2.5;  // ratio of their products

/// Causal: half of the scores. Tensors [..., T, channels]; leading dimensions are batches and heads.
double attention_seconds(const Tensor& query, const Tensor& key, int64_t length, bool causal, bool backward) {
  const auto& in_16 = settings().model.attention_16;
  const auto& shares = key.element_size() == 2 && !in_16.empty() ? in_16 : settings().model.attention;
  const int64_t channels = query.size(-1);
  const auto share = std::find_if(shares.begin(), shares.end(), [&](const auto& each) {
    return each.channels >= channels || &each == &shares.back();
  });
  if (share == shares.end() || query.numel() == 0) return 0;
  const auto keys = static_cast<double>(length);
  const double flops = (causal ? 2.0 : 4.0) * static_cast<double>(query.numel()) * keys;
  const double reached = (backward ? share->backward : share->forward) * keys / (keys + kAttentionStart);
  return (backward ? kBackwardOfForward : 1.0) * flops / (peak_of(key) * reached);
}

using ArithmeticFormula = double (*)(const c10::IValue* arguments);

const std::unordered_map<std::string, ArithmeticFormula>& arithmetic_formulas() {
  using A = const c10::IValue*;
  constexpr int64_t kTime = -2;
  static const std::unordered_map<std::string, ArithmeticFormula> all = {
      {"aten::mm", [](A a) { return product_seconds(a[0].toTensor(), a[1].toTensor()); }},
      {"aten::bmm", [](A a) { return product_seconds(a[0].toTensor(), a[1].toTensor()); }},
      {"aten::addmm", [](A a) { return product_seconds(a[1].toTensor(), a[2].toTensor()); }},
      {"aten::addmm_", [](A a) { return product_seconds(a[1].toTensor(), a[2].toTensor()); }},
      {"aten::baddbmm", [](A a) { return product_seconds(a[1].toTensor(), a[2].toTensor()); }},
      {"aten::_grouped_mm", [](A a) { return product_seconds(a[0].toTensor(), a[1].toTensor()); }},
      {"aten::_scaled_mm", [](A a) { return product_seconds(a[0].toTensor(), a[1].toTensor()); }},
      {"aten::_scaled_dot_product_flash_attention_for_cpu",
       [](A a) {
         const Tensor& key = a[1].toTensor();
         return attention_seconds(a[0].toTensor(), key, key.size(kTime), a[4].toBool(), false);
       }},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward",
       [](A a) {
         const Tensor& key = a[2].toTensor();
         return attention_seconds(a[1].toTensor(), key, key.size(kTime), a[7].toBool(), true);
       }},
      {"aten::_flash_attention_forward",
       [](A a) { return attention_seconds(a[0].toTensor(), a[1].toTensor(), a[6].toInt(), a[8].toBool(), false); }},
      {"aten::_flash_attention_backward",
       [](A a) { return attention_seconds(a[1].toTensor(), a[2].toTensor(), a[9].toInt(), a[11].toBool(), true); }},
  };
  return all;
}

}  // namespace

double arithmetic_seconds(const c10::OperatorHandle& op, const Stack& stack) {
  const auto found = arithmetic_formulas().find(op.schema().name());
  if (found == arithmetic_formulas().end()) return 0;
  return found->second(stack.data() + (stack.size() - op.schema().arguments().size()));
}

bool reads_what_it_writes(const std::string& name) {
  constexpr std::array kOnlyWrite = {"aten::zero_", "aten::fill_", "aten::uniform_", "aten::normal_"};
  return name.ends_with('_') && std::ranges::find(kOnlyWrite, name) == kOnlyWrite.end();
}

double kernel_seconds(const std::string& name, double arithmetic, int64_t bytes, bool narrow) {
  const DeviceModel& model = settings().model;
  double bandwidth = model.memory_bandwidth * model.memory_share;
  if (const auto wide = model.operators.find(name); wide != model.operators.end()) bandwidth = wide->second;
  const auto in_16 = model.operators_16.find(name);
  if (narrow && in_16 != model.operators_16.end()) bandwidth = in_16->second;
  const double moved = static_cast<double>(bytes) / bandwidth;
  return std::max(arithmetic, moved) + model.kernel_start;
}

/// NCCL's cost model as for large groups: all-gathers and reduce-scatters use a ring of all devices, hop by hop;
/// all-reduces use a chain within each node and a tree of nodes, up and down; messages to single ranks start together.
/// A node's devices share the network traffic.
double collective_seconds(const std::string& kind, int64_t bytes, const std::vector<int>& ranks) {
  constexpr double kCollectiveStart = 8.4e-6;
  const DeviceModel& model = settings().model;
  const auto devices = static_cast<int>(model.node_devices);
  const auto local =
      std::count_if(ranks.begin(), ranks.end(), [&](int rank) { return rank / devices == ranks.front() / devices; });
  const auto size = static_cast<double>(ranks.size()), near = static_cast<double>(local);
  const double nodes = std::ceil(size / near);
  const double bandwidth =
      nodes > 1 ? std::min(near > 1 ? model.node_bandwidth : model.network_bandwidth, near * model.network_bandwidth)
                : model.node_bandwidth;
  const double passes = kind == "all_reduce" ? 2 : 1;
  const double moved = passes * static_cast<double>(bytes) * (size - 1) / size / bandwidth;
  double hops_near = size - nodes, hops_far = nodes - 1;
  if (kind == "all_reduce") {
    hops_near = 2 * (near - 1);
    hops_far = 2 * std::ceil(std::log2(nodes));
  } else if (kind == "all_to_all" || kind == "shift") {
    hops_near = nodes > 1 ? 0 : 1;
    hops_far = nodes > 1 ? 1 : 0;
  }
  const bool is_gpu = model.program_memory == 0;
  return moved + hops_near * model.node_latency + hops_far * model.network_latency +
         (is_gpu ? kCollectiveStart : model.kernel_start);
}

}  // namespace megashard::sim
