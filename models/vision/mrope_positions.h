#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "models/config/vision_config.h"
#include "parallel/sequence_parallel/ulysses.h"

namespace megashard {

/// Pictures of a batch, in the order of their placeholder tokens. Undefined: none.
struct PictureGrids {
  at::Tensor images;             ///< [N, 3] int64: frames, rows and columns of patches
  at::Tensor videos;             ///< [M, 3]
  at::Tensor seconds_per_frame;  ///< [M] fp32, of the videos; undefined: 1
};

/// Positions of pictures in a batch.
struct PicturePlaces {
  /// [3, B, T]: time, height, width (transformers' get_rope_index). int64, or fp32 if some are not whole numbers.
  at::Tensor position_ids;
  /// [features] int64: the token, of B * T, that each feature replaces; images first, then videos.
  at::Tensor token_indices;
};

/// Computes positions from values on the host. A picture takes as many placeholder tokens as it has features; the text
/// after it continues from its larger side. With VisionLanguageConfig::sound the features of a video and of its sound
/// alternate by time. Positions start at 0 in each row, or in each document of `document_lengths`
/// (as in Batch) if defined. Throws one error if the placeholder tokens do not match the grids.
PicturePlaces place_pictures(const VisionLanguageConfig& config, const at::Tensor& tokens, const PictureGrids& grids,
                             const at::Tensor& document_lengths = {});

/// Returns the rows of the marked items (pictures, clips), of which each has as many consecutive rows as `counts`
/// [items] int64 says. The marks are those of [first, first + items). Undefined if no item is marked.
at::Tensor rows_of_items(const at::Tensor& rows, const at::Tensor& counts, const std::vector<bool>& marks,
                         int64_t first = 0);

/// Pictures, or clips of audio, for a rank that has some rows of each sequence.
struct OwnItems {
  std::vector<bool> items;     ///< per item: true if one of its features is in these rows
  at::Tensor features;         ///< [N] int64: the features of those items in these rows, in order
  at::Tensor token_indices;    ///< [N] int64: their tokens, of B * rows
};

/// `features_of` [items] int64: number of `token_indices` (into the B * T tokens of whole sequences) of each item.
OwnItems items_in_rows(const at::Tensor& token_indices, const at::Tensor& features_of, const SequenceShard& shard);

}  // namespace megashard
