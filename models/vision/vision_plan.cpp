#include "models/vision/vision_plan.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace megashard {
namespace {

using Units = std::vector<int64_t>;

struct Grid {
  int64_t frames, rows, columns;  // of patches
};

std::vector<Grid> grids_of(const at::Tensor& tensor) {
  const auto dense = tensor.contiguous();
  const auto* value = dense.const_data_ptr<int64_t>();
  std::vector<Grid> grids;
  for (int64_t i = 0; i < dense.size(0); ++i) grids.push_back({value[3 * i], value[3 * i + 1], value[3 * i + 2]});
  return grids;
}

at::Tensor index_tensor(const std::vector<int64_t>& values) {
  auto tensor = at::empty({static_cast<int64_t>(values.size())}, at::kLong);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<int64_t>());
  return tensor;
}

std::vector<int64_t> inverse_of(const std::vector<int64_t>& order) {
  std::vector<int64_t> inverse(order.size());
  for (size_t i = 0; i < order.size(); ++i) inverse[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
  return inverse;
}

bool counts_up(const std::vector<int64_t>& order) {
  for (size_t i = 0; i < order.size(); ++i)
    if (order[i] != static_cast<int64_t>(i)) return false;
  return true;
}

/// Units of each frame, and of each square of `window` units a side in it.
struct UnitSets {
  std::vector<Units> frames, windows;
};

UnitSets sets_of(const std::vector<Grid>& grids, int64_t merge, int64_t window) {
  UnitSets sets;
  int64_t first = 0;  // unit of the frame
  for (const auto& grid : grids) {
    const int64_t rows = grid.rows / merge, columns = grid.columns / merge;
    for (int64_t frame = 0; frame < grid.frames; ++frame, first += rows * columns) {
      Units all(static_cast<size_t>(rows * columns));
      std::iota(all.begin(), all.end(), first);
      sets.frames.push_back(std::move(all));
      if (window == 0) continue;
      for (int64_t top = 0; top < rows; top += window) {
        for (int64_t left = 0; left < columns; left += window) {
          Units inside;
          for (int64_t row = top; row < std::min(rows, top + window); ++row)
            for (int64_t column = left; column < std::min(columns, left + window); ++column)
              inside.push_back(first + row * columns + column);
          sets.windows.push_back(std::move(inside));
        }
      }
    }
  }
  return sets;
}

void sort_by_size(std::vector<Units>& sets) {
  std::stable_sort(sets.begin(), sets.end(), [](const Units& a, const Units& b) { return a.size() < b.size(); });
}

/// Of sets that are sorted by size.
std::vector<Segments::Run> runs_of(const std::vector<Units>& sets, int64_t unit) {
  std::vector<Segments::Run> runs;
  for (const auto& set : sets) {
    const int64_t length = static_cast<int64_t>(set.size()) * unit;
    if (runs.empty() || runs.back().length != length) runs.push_back({length, 0});
    ++runs.back().count;
  }
  return runs;
}

std::vector<int64_t> joined(const std::vector<Units>& sets) {
  std::vector<int64_t> all;
  for (const auto& set : sets) all.insert(all.end(), set.begin(), set.end());
  return all;
}

/// Segments of frames in a tower whose units lie by `place`.
Segments frame_segments(std::vector<Units> frames, const std::vector<int64_t>& place, int64_t unit) {
  std::vector<int64_t> order;
  for (auto& frame : frames) {
    for (auto& each : frame) each = place[static_cast<size_t>(each)];
    std::sort(frame.begin(), frame.end());
    for (const auto each : frame)
      for (int64_t patch = 0; patch < unit; ++patch) order.push_back(each * unit + patch);
  }
  Segments segments;
  segments.runs = runs_of(frames, unit);
  if (counts_up(order)) return segments;
  segments.order = index_tensor(order);
  segments.inverse = index_tensor(inverse_of(order));
  return segments;
}

/// Neighbours of a point on an axis of the position embedding, and their weights.
struct Taps {
  std::vector<int64_t> rows;
  std::vector<float> weights;
};

/// Linear, ends on ends.
Taps linear_taps(int64_t index, int64_t size, int64_t side) {
  const float at =
      static_cast<float>(index) * static_cast<float>(side - 1) / static_cast<float>(std::max<int64_t>(size - 1, 1));
  const float below = std::floor(at);
  Taps taps;
  for (int64_t i = 0; i < 2; ++i) {
    taps.rows.push_back(std::clamp<int64_t>(static_cast<int64_t>(below) + i, 0, side - 1));
    taps.weights.push_back(std::max(0.0F, 1 - std::abs(at - below - static_cast<float>(i))));
  }
  return taps;
}

Taps centred_taps(int64_t index, int64_t size, int64_t side) {
  const double at =
      std::max(0.0, (static_cast<double>(index) + 0.5) * static_cast<double>(side) / static_cast<double>(size) - 0.5);
  const double below = std::floor(at);
  const auto row = static_cast<int64_t>(below);
  return {{std::min(row, side - 1), std::min(row + 1, side - 1)},
          {static_cast<float>(1 - (at - below)), static_cast<float>(at - below)}};
}

/// Cubic convolution (PyTorch's bicubic, of slope -0.75), centres on centres; a border stands for what lies beyond it.
Taps cubic_taps(int64_t index, int64_t size, int64_t side) {
  constexpr double kSlope = -0.75;
  const double at = (static_cast<double>(index) + 0.5) * static_cast<double>(side) / static_cast<double>(size) - 0.5;
  const double below = std::floor(at);
  Taps taps;
  for (int64_t i = -1; i < 3; ++i) {
    const double x = std::abs(at - below - static_cast<double>(i));
    const double weight =
        x <= 1 ? ((kSlope + 2) * x - (kSlope + 3)) * x * x + 1 : ((x - 5) * x + 8) * x * kSlope - 4 * kSlope;
    taps.rows.push_back(std::clamp<int64_t>(static_cast<int64_t>(below) + i, 0, side - 1));
    taps.weights.push_back(static_cast<float>(weight));
  }
  return taps;
}

struct PatchPlace {
  int64_t row, column, rows, columns;
};

/// Of every patch as given: units row by row, patches of a unit row by row.
std::vector<PatchPlace> places_of(const std::vector<Grid>& grids, int64_t merge) {
  std::vector<PatchPlace> places;
  for (const auto& grid : grids) {
    for (int64_t frame = 0; frame < grid.frames; ++frame)
      for (int64_t top = 0; top < grid.rows; top += merge)
        for (int64_t left = 0; left < grid.columns; left += merge)
          for (int64_t patch = 0; patch < merge * merge; ++patch)
            places.push_back({top + patch / merge, left + patch % merge, grid.rows, grid.columns});
  }
  return places;
}

}  // namespace

void check_grids(const VisionConfig& config, const at::Tensor& grids, const std::string& name) {
  TORCH_CHECK(grids.dim() == 2 && grids.size(1) == 3 && grids.scalar_type() == at::kLong && grids.device().is_cpu(),
              name, " must be int64 [images, 3] (frames, rows and columns of patches), got ", grids.scalar_type(), " ",
              grids.sizes());
  const auto each = grids_of(grids);
  for (size_t i = 0; i < each.size(); ++i) {
    const auto& grid = each[i];
    TORCH_CHECK(config.fixed_side == 0 ||
                    (grid.frames == 1 && grid.rows == config.fixed_side && grid.columns == config.fixed_side),
                name, "[", i, "] is [", grid.frames, ", ", grid.rows, ", ", grid.columns,
                "], and this model's images are "
                "[1, ",
                config.fixed_side, ", ", config.fixed_side, "]: prepare the pictures by its own processor");
    TORCH_CHECK(!config.square_images || (grid.frames == 1 && grid.rows == grid.columns), name, "[", i, "] is [",
                grid.frames, ", ", grid.rows, ", ", grid.columns,
                "], and this model's images are square tiles: prepare the pictures by its own processor");
    TORCH_CHECK(!config.images_only || grid.frames == 1, name, "[", i, "] has ", grid.frames,
                " frames, and this model's videos are not supported: leave them out");
    const bool fits = grid.frames > 0 && grid.rows > 0 && grid.columns > 0 && grid.rows % config.merge_size == 0 &&
                      grid.columns % config.merge_size == 0;
    TORCH_CHECK(fits, name, "[", i, "] is [", grid.frames, ", ", grid.rows, ", ", grid.columns,
                "]: all must be positive, and rows and columns of patches multiples of the model's merge size ",
                config.merge_size, ": prepare the pictures by the model's own processor");
  }
}

Segments segments_of(const std::vector<int64_t>& lengths) {
  std::vector<Units> sets;
  int64_t rows = 0;
  for (const int64_t length : lengths) {
    sets.emplace_back(static_cast<size_t>(length));
    std::iota(sets.back().begin(), sets.back().end(), rows);
    rows += length;
  }
  sort_by_size(sets);
  Units place(static_cast<size_t>(rows));
  std::iota(place.begin(), place.end(), int64_t{0});
  return frame_segments(std::move(sets), place, /*unit=*/1);
}

VisionPlan plan_vision(const VisionConfig& config, const at::Tensor& grids) {
  const auto list = grids_of(grids);
  const int64_t merge = config.merge_size, unit = merge * merge;
  auto sets = sets_of(list, merge, config.window_size / merge / config.patch_size);
  sort_by_size(sets.frames);
  sort_by_size(sets.windows);
  const auto order = joined(sets.windows.empty() ? sets.frames : sets.windows);
  const auto place = inverse_of(order);

  VisionPlan plan;
  plan.features = static_cast<int64_t>(order.size());
  plan.patches = plan.features * unit;
  plan.windows.runs = runs_of(sets.windows, unit);
  plan.frames = frame_segments(std::move(sets.frames), place, unit);
  if (!counts_up(order)) {
    plan.unit_order = index_tensor(order);
    plan.unit_inverse = index_tensor(place);
  }
  const bool learned = config.position_side > 0;
  plan.positions = at::empty({plan.patches, 2}, at::kLong);
  auto* position = plan.positions.mutable_data_ptr<int64_t>();
  int64_t* tap = nullptr;
  float* weight = nullptr;
  if (learned) {
    const int64_t count = config.positions == PositionTaps::kCubicCentres ? 16 : 4;
    plan.taps = at::empty({plan.patches, count}, at::kLong);
    plan.tap_weights = at::empty({plan.patches, count}, at::kFloat);
    tap = plan.taps.mutable_data_ptr<int64_t>();
    weight = plan.tap_weights.mutable_data_ptr<float>();
  }
  const auto places = places_of(list, merge);
  for (const auto from : order) {
    for (int64_t patch = 0; patch < unit; ++patch) {
      const auto& here = places[static_cast<size_t>(from * unit + patch)];
      *position++ = here.row;
      *position++ = here.column;
      if (!learned) continue;
      const auto taps_of = config.positions == PositionTaps::kCubicCentres    ? cubic_taps
                           : config.positions == PositionTaps::kLinearCentres ? centred_taps
                                                                              : linear_taps;
      const auto rows = taps_of(here.row, here.rows, config.position_side);
      const auto columns = taps_of(here.column, here.columns, config.position_side);
      for (size_t i = 0; i < rows.rows.size(); ++i) {
        for (size_t j = 0; j < columns.rows.size(); ++j) {
          *tap++ = rows.rows[i] * config.position_side + columns.rows[j];
          *weight++ = rows.weights[i] * columns.weights[j];
        }
      }
    }
  }
  return plan;
}

}  // namespace megashard
