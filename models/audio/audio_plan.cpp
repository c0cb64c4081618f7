#include "models/audio/audio_plan.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>

namespace megashard {
namespace {

at::Tensor tensor_of(const std::vector<int64_t>& values) {
  auto tensor = at::empty({std::ssize(values)}, at::kLong);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<int64_t>());
  return tensor;
}

/// Where a clip's chunks are: the length that they are convolved with, and the first one's number among those.
struct PlacedClip {
  int64_t frames, length, first;
};

}  // namespace

AudioPlan plan_audio(const AudioConfig& config, const at::Tensor& lengths) {
  AudioPlan plan;
  std::vector<PlacedClip> clips;
  std::map<int64_t, std::vector<int64_t>> frames_of;  // by length
  int64_t all_frames = 0;
  for (const int64_t frames : c10::IntArrayRef(lengths.const_data_ptr<int64_t>(), lengths.numel())) {
    const int64_t length = config.pads_short_clips ? config.chunk : std::min(config.chunk, frames);
    auto& numbers = frames_of[length];
    clips.push_back({frames, length, std::ssize(numbers) / length});
    const int64_t padded = (frames + length - 1) / length * length;
    for (int64_t i = 0; i < padded; ++i) numbers.push_back(i < frames ? all_frames + i : -1);
    all_frames += frames;
  }
  plan.frames = all_frames;
  std::map<int64_t, int64_t> first_row;  // by a chunk's length: the first convolved row
  int64_t next = 0;
  for (auto& [length, numbers] : frames_of) {
    std::ranges::replace(numbers, int64_t{-1}, all_frames);
    const int64_t count = std::ssize(numbers) / length;
    plan.chunks.push_back({length, tensor_of(numbers).view({count, length})});
    first_row[length] = next;
    next += count * AudioConfig::features_of(length);
  }
  std::vector<int64_t> rows, counts, windows;
  for (const auto& clip : clips) {
    const auto before = std::ssize(rows);
    const int64_t of_chunk = AudioConfig::features_of(clip.length);
    int64_t row = first_row[clip.length] + clip.first * of_chunk;
    for (int64_t begin = 0; begin < clip.frames; begin += clip.length, row += of_chunk) {
      const int64_t kept = AudioConfig::features_of(std::min(clip.length, clip.frames - begin));
      for (int64_t i = 0; i < kept; ++i) rows.push_back(row + i);
    }
    counts.push_back(std::ssize(rows) - before);
    const int64_t window = config.window * AudioConfig::features_of(config.chunk);
    for (int64_t i = 0; i < counts.back(); i += window) windows.push_back(std::min(window, counts.back() - i));
  }
  plan.rows = tensor_of(rows);
  plan.counts = tensor_of(counts);
  plan.windows = segments_of(windows);
  return plan;
}

}  // namespace megashard
