#include "parallel/tensor_parallel_layout.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "parallel/guarded_tensor.h"

namespace megashard {
namespace {

size_t at_dim(const Placement& placement) { return static_cast<size_t>(placement.dim); }

std::string names_of(const TensorParallelLayouts& layouts) {
  std::string names;
  for (const auto& layout : layouts) names += (names.empty() ? " of '" : "' and '") + layout.dim_name;
  return names.empty() ? names : names + "'";
}

}  // namespace

void set_tensor_parallel(const at::Tensor& parameter, const DeviceMeshPtr& mesh, Placement placement) {
  TORCH_CHECK(mesh != nullptr && mesh->ndim() == 1,
              "set_tensor_parallel needs a 1-D mesh (mesh->submesh({\"tp\"})), got ",
              mesh == nullptr ? std::string("none") : mesh->describe());
  TORCH_CHECK(!is_guarded(parameter), "parameter '", guarded_name(parameter),
              "' is under fully_shard already: declare it tensor-parallel first, then shard its piece");
  if (placement.kind != Placement::Kind::kReplicate) {
    TORCH_CHECK(placement.kind == Placement::Kind::kShard,
                "a tensor-parallel weight is replicated or sharded on a dimension; the strided placement over the FSDP "
                "mesh follows from that");
    if (placement.dim < 0) placement.dim += parameter.dim();
    TORCH_CHECK(0 <= placement.dim && placement.dim < parameter.dim(), "a tensor-parallel weight of sizes ",
                parameter.sizes(), " cannot be sharded on dimension ", placement.dim);
  }
  const std::string name = mesh->dim_names().empty() ? "tp" : mesh->dim_names()[0];
  ParameterRecords::all().change(parameter, [&](ParameterRecord& record) {
    std::erase_if(record.layouts, [&](const auto& each) { return each.dim_name == name; });
    record.layouts.push_back({mesh->group(0), name, placement});
  });
}

TensorParallelLayouts tensor_parallel_layouts(const at::Tensor& parameter) {
  const auto entries = ParameterRecords::all().read(parameter, [](const auto& record) { return record.layouts; });
  TensorParallelLayouts layouts;
  for (const auto& entry : entries) {
    auto group = entry.group.lock();
    TORCH_CHECK(group != nullptr, "the process group of mesh dimension '", entry.dim_name,
                "' is gone, and a tensor-parallel weight of sizes ", parameter.sizes(),
                " still needs it: keep the mesh while the model lives");
    layouts.push_back({std::move(group), entry.dim_name, entry.placement});
  }
  return layouts;
}

at::Tensor tensor_parallel_slice(const at::Tensor& whole, at::IntArrayRef piece_sizes,
                                 const TensorParallelLayouts& layouts) {
  if (whole.sizes() == piece_sizes) return whole;
  auto expected = piece_sizes.vec();
  for (const auto& layout : layouts) {
    if (layout.placement.kind == Placement::Kind::kShard) expected[at_dim(layout.placement)] *= layout.group->size();
  }
  TORCH_CHECK(whole.sizes() == at::IntArrayRef(expected), "a tensor-parallel weight has sizes ",
              at::IntArrayRef(expected), " in the whole model and ", piece_sizes, " on each rank", names_of(layouts),
              ", but the weights given have ", whole.sizes());
  auto piece = whole;
  for (const auto& layout : layouts) {
    if (layout.placement.kind != Placement::Kind::kShard) continue;
    const int64_t length = piece_sizes[at_dim(layout.placement)];
    piece = piece.narrow(layout.placement.dim, layout.group->rank() * length, length);
  }
  return piece;
}

DeviceMeshPtr joint_mesh(const DeviceMeshPtr& fsdp_mesh, const TensorParallelLayouts& layouts) {
  std::vector<ProcessGroupPtr> groups;
  for (int dim = 0; dim < fsdp_mesh->ndim(); ++dim) groups.push_back(fsdp_mesh->group(dim));
  auto names = fsdp_mesh->dim_names();
  if (names.empty()) names.emplace_back("dp");
  for (const auto& layout : layouts) {
    groups.push_back(layout.group);
    names.push_back(layout.dim_name);
  }
  return std::make_shared<const DeviceMesh>(std::move(groups), std::move(names));
}

ShardedTensor in_whole_model(ShardedTensor part, const TensorParallelLayouts& layouts, DeviceMeshPtr joint) {
  part.mesh = std::move(joint);
  for (const auto& layout : layouts) {
    part.placements.push_back(layout.placement);
    if (layout.placement.kind == Placement::Kind::kReplicate) continue;
    const size_t dim = at_dim(layout.placement);
    const int64_t pieces = layout.group->size();
    const int64_t length = part.global_sizes[dim];
    for (size_t i = 0; i + 1 < part.placements.size(); ++i) {
      if (pieces > 1 && part.placements[i] == Placement::shard(layout.placement.dim))
        part.placements[i] = Placement::strided_shard(layout.placement.dim, pieces);
    }
    part.global_sizes[dim] = length * pieces;
    // All parts without rows get the end of the whole tensor as offset: the end of their own piece is also the offset
    // of the next piece's first part.
    part.offsets[dim] = part.local.size(layout.placement.dim) == 0 ? part.global_sizes[dim]
                                                                   : part.offsets[dim] + layout.group->rank() * length;
  }
  return part;
}

ShardedTensor unsharded_view(const at::Tensor& parameter) {
  auto whole = ShardedTensor::replicated(parameter.detach());
  const auto layouts = tensor_parallel_layouts(parameter);
  if (layouts.empty()) return whole;
  std::vector<ProcessGroupPtr> groups;
  std::vector<std::string> names;
  for (const auto& layout : layouts) {
    groups.push_back(layout.group);
    names.push_back(layout.dim_name);
  }
  auto mesh = std::make_shared<const DeviceMesh>(std::move(groups), std::move(names));
  return in_whole_model(std::move(whole), layouts, std::move(mesh));
}

void check_tensor_parallel(const std::string& name, const at::Tensor& parameter, const DeviceMesh& fsdp_mesh) {
  for (const auto& layout : tensor_parallel_layouts(parameter)) {
    const ProcessGroup& tp = *layout.group;
    TORCH_CHECK(tp.device_type() == fsdp_mesh.device_type(), "parameter '", name,
                "' is tensor-parallel over a mesh of ", c10::DeviceTypeName(tp.device_type(), /*lower_case=*/true),
                " devices, and fully_shard shards over one of ", c10::DeviceTypeName(fsdp_mesh.device_type(), true),
                " devices: make both from one mesh");
    for (int dim = 0; dim < fsdp_mesh.ndim(); ++dim) {
      const auto& others = fsdp_mesh.group(dim)->ranks();
      const auto shared = std::count_if(tp.ranks().begin(), tp.ranks().end(), [&](int rank) {
        return std::find(others.begin(), others.end(), rank) != others.end();
      });
      TORCH_CHECK(shared == 1, "parameter '", name, "' is tensor-parallel over ", tp.size(), " ranks, ", shared,
                  " of which are in one group of the mesh ", fsdp_mesh.describe(),
                  " that fully_shard was given: the two must be different dimensions of one mesh "
                  "(mesh->submesh({\"dp\"}), mesh->submesh({\"tp\"}))");
    }
  }
}

}  // namespace megashard
