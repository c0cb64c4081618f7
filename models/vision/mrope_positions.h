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

/// Where pictures stand in a batch.
struct PicturePlaces {
  at::Tensor position_ids;  ///< [3, B, T] int64: time, height, width (transformers' get_rope_index)
  /// [features] int64: of the B * T tokens, which stands for each feature; images first, then videos.
  at::Tensor token_indices;
};

/// From values on the host. A picture takes as many placeholder tokens as it has features; text
/// behind it goes on from its larger side. Positions begin at 0 in each row, or in each document of
/// `document_lengths` (as in Batch), where that is defined. Throws one error when the tokens'
/// placeholders are not those of the grids.
PicturePlaces place_pictures(const VisionLanguageConfig& config, const at::Tensor& tokens, const PictureGrids& grids,
                             const at::Tensor& document_lengths = {});

/// What a rank that has some rows of each sequence needs of its pictures.
struct OwnPictures {
  std::vector<bool> pictures;  ///< of each: whether one of its features lies in these rows
  at::Tensor features;         ///< [N] int64: which features of those pictures lie there, in their order
  at::Tensor token_indices;    ///< [N] int64: where in the B * rows tokens
};

/// `features_of` [pictures] int64: how many of `token_indices`, of the B * T whole tokens, each
/// picture has.
OwnPictures pictures_in_rows(const at::Tensor& token_indices, const at::Tensor& features_of,
                             const SequenceShard& shard);

}  // namespace megashard
