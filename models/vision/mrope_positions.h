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
  at::Tensor position_ids;  ///< [3, B, T] int64: time, height, width (transformers' get_rope_index)
  /// [features] int64: the token, of B * T, that each feature replaces; images first, then videos.
  at::Tensor token_indices;
};

/// Computes positions from values on the host. A picture takes as many placeholder tokens as it has features; the text
/// after it continues from its larger side. Positions start at 0 in each row, or in each document of `document_lengths`
/// (as in Batch) if defined. Throws one error if the placeholder tokens do not match the grids.
PicturePlaces place_pictures(const VisionLanguageConfig& config, const at::Tensor& tokens, const PictureGrids& grids,
                             const at::Tensor& document_lengths = {});

/// Pictures for a rank that has some rows of each sequence.
struct OwnPictures {
  std::vector<bool> pictures;  ///< per picture: true if one of its features is in these rows
  at::Tensor features;         ///< [N] int64: the features of those pictures in these rows, in order
  at::Tensor token_indices;    ///< [N] int64: their tokens, of B * rows
};

/// `features_of` [pictures] int64: number of `token_indices` (into the B * T tokens of whole sequences) of each
/// picture.
OwnPictures pictures_in_rows(const at::Tensor& token_indices, const at::Tensor& features_of,
                             const SequenceShard& shard);

}  // namespace megashard
