#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "parallel/sharded_tensor.h"

namespace megashard {

// Maps the weights of a model to their form in files: other names, separate or packed experts, transposed, fused, or
// in Megatron's order of rows. All forms are views, so one description serves reading and writing, whole and sharded.

/// Hugging Face's name of the output projection, and the end of that of the embeddings.
inline constexpr const char* kHeadWeight = "lm_head.weight";
inline constexpr const char* kScoreWeight = "score.weight";
inline constexpr const char* kEmbeddingsWeight = "embed_tokens.weight";

/// A box of a model's tensor, and where a tensor of the files has it.
struct WeightPart {
  std::string tensor;                          ///< name in the model
  std::vector<int64_t> offsets, sizes;         ///< begin and extent of the box in the model's tensor
  std::string stored;                          ///< name in the files
  std::vector<int64_t> stored_sizes;           ///< sizes of the stored tensor
  std::vector<int64_t> view{}, permutation{};  ///< give it the model's dimensions: view(), then permute(); empty: none
  std::vector<int64_t> stored_offsets{};       ///< begin of the box after view and permutation; empty: zeros
  bool padded = false;                         ///< the stored tensor may have any number of further rows
};

/// The stored tensor is the whole tensor of the model, after view() and permute().
WeightPart whole_part(std::string tensor, std::string stored, std::vector<int64_t> stored_sizes,
                      std::vector<int64_t> view = {}, std::vector<int64_t> permutation = {});
/// The stored tensor is the slice of the model's at these leading indices: [7, 1] for the up projection of expert 7.
WeightPart indexed_part(std::string tensor, const std::vector<int64_t>& index, std::string stored,
                        std::vector<int64_t> stored_sizes);
/// `rows` rows (dimension 0): of the model's tensor from `first` on, of the stored one from `stored_first` on.
WeightPart rows_part(std::string tensor, int64_t first, int64_t rows, std::string stored,
                     std::vector<int64_t> stored_sizes, int64_t stored_first);

/// Sizes that a stored tensor needs for the part; a padded one may have more rows.
std::vector<int64_t> least_sizes(const WeightPart& part);
bool is_stored_with(const WeightPart& part, std::vector<int64_t> sizes);

/// One of the forms that files can have for some of a model's tensors.
struct StoredForm {
  std::string kind;  ///< "separate", "packed", "transposed", "megatron"
  std::vector<WeightPart> parts;
};

/// Tensors of a model that have one form in a file together, since only their sizes together say which it is.
struct WeightGroup {
  struct Member {
    std::string name;
    std::vector<int64_t> sizes;
  };
  std::vector<Member> tensors;
  std::vector<StoredForm> forms;  ///< the first is written
};

/// Sizes of a tensor in the files; null if there is none.
using StoredSizes = std::function<const std::vector<int64_t>*(const std::string& stored)>;
/// The first form whose tensors are all there with their sizes; null if none is.
const StoredForm* fitting_form(const WeightGroup& group, const StoredSizes& sizes);

/// A part of a dotted name in the model, and in the files: "model.visual." and "visual.". If both are equal,
/// later renamings do not apply to the name.
struct WeightRenaming {
  std::string model, files;
};

/// What is different in a model's files. By default nothing: names and sizes are the model's.
struct WeightMap {
  std::vector<WeightGroup> groups{};  ///< other tensors are stored as they are. Names in forms are not yet renamed
  std::vector<WeightRenaming> renamings{};  ///< of the rest the first that fits
  /// Beginnings of the names of tensors in the files that belong to a model beside this one.
  std::vector<std::string> left_out{};

  /// Convert names; those that have the result's spelling already are unchanged.
  std::string published_name(const std::string& name) const;
  std::string model_name(const std::string& published) const;
  bool leaves_out(const std::string& published) const;
  /// The group of a tensor of the model; null if it is stored as it is.
  const WeightGroup* group_of(const std::string& tensor) const;
};

/// The part of a stored tensor that is the box, with the sizes of the box; a view.
at::Tensor box_of(const WeightPart& part, const at::Tensor& stored);
/// Copies the part of the shard that the box has.
void read_part(const WeightPart& part, const at::Tensor& stored, const ShardedTensor& into);

/// Whether a part of which the shard has nothing becomes an empty piece, so that all ranks name the same tensors.
enum class EmptyPieces { kLeaveOut, kKeep };
/// A shard of `tensor` as shards of the stored tensors, by their names: views of it, so they can be read into and
/// written. `tensor` is a weight, or a state of an optimizer with its sizes.
ShardedTensors stored_pieces(const StoredForm& form, const std::string& tensor, const ShardedTensor& shard,
                             EmptyPieces empty = EmptyPieces::kLeaveOut);

/// A tensor of a checkpoint ("model.<name>", "optimizer.state.<name>.<buffer>") as shards of those that each of its
/// other forms has, on every rank of all of them. Empty if there are none (LoadOptions::other_forms).
std::vector<ShardedTensors> other_forms(const WeightMap& map, const std::string& key, const ShardedTensor& tensor);

/// Names of all forms of the map.
std::vector<std::string> names_in_forms(const WeightMap& map);

}  // namespace megashard
