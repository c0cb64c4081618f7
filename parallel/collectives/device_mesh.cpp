#include "parallel/collectives/device_mesh.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <functional>
#include <numeric>

namespace megashard {

namespace {

void check_names(const std::vector<std::string>& dim_names, size_t ndim) {
  TORCH_CHECK(dim_names.size() == ndim || (dim_names.empty() && ndim == 1), "device mesh: ", ndim,
              " dimensions need as many names, got ", dim_names.size());
  for (auto name = dim_names.begin(); name != dim_names.end(); ++name) {
    TORCH_CHECK(std::find(dim_names.begin(), name, *name) == name, "device mesh: two dimensions are named '", *name,
                "'");
  }
}

}  // namespace

DeviceMesh::DeviceMesh(ProcessGroupPtr world, std::vector<int> shape, std::vector<std::string> dim_names)
    : world_(world), dim_names_(std::move(dim_names)), device_(world->device()) {
  TORCH_CHECK(!shape.empty(), "device mesh: the shape has no dimension");
  check_names(dim_names_, shape.size());
  const bool positive = std::all_of(shape.begin(), shape.end(), [](int extent) { return extent > 0; });
  const int ranks = std::accumulate(shape.begin(), shape.end(), 1, std::multiplies<>());
  TORCH_CHECK(positive && ranks == world->size(), "device mesh: shape ", c10::ArrayRef<int>(shape),
              " has no place for each of the ", world->size(), " ranks of group '", world->name(),
              "'; the product must be ", world->size());
  int stride = ranks;
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    const int extent = shape[dim];
    stride /= extent;
    if (extent == world->size()) {
      groups_.push_back(world);
      continue;
    }
    const int first = world->rank() - (world->rank() / stride) % extent * stride;
    std::vector<int> members;
    for (int i = 0; i < extent; ++i) members.push_back(first + i * stride);
    groups_.push_back(world->split(members, dim_names_.empty() ? "dim " + std::to_string(dim) : dim_names_[dim]));
  }
}

DeviceMesh::DeviceMesh(std::vector<ProcessGroupPtr> groups, std::vector<std::string> dim_names)
    : groups_(std::move(groups)),
      dim_names_(std::move(dim_names)),
      device_(groups_.empty() ? c10::Device(c10::kCPU) : groups_.front()->device()) {
  TORCH_CHECK(!groups_.empty(), "device mesh: no groups were given");
  check_names(dim_names_, groups_.size());
}

int DeviceMesh::size() const {
  int product = 1;
  for (const ProcessGroupPtr& group : groups_) product *= group->size();
  return product;
}

int DeviceMesh::dim_of(const std::string& dim_name) const {
  const auto found = std::find(dim_names_.begin(), dim_names_.end(), dim_name);
  TORCH_CHECK(found != dim_names_.end(), "device mesh ", describe(), " has no dimension '", dim_name, "'");
  return static_cast<int>(found - dim_names_.begin());
}

const ProcessGroupPtr& DeviceMesh::group(const std::string& dim_name) const { return groups_[dim_of(dim_name)]; }

std::shared_ptr<const DeviceMesh> DeviceMesh::submesh(const std::vector<std::string>& dim_names) const {
  TORCH_CHECK(!dim_names.empty(), "device mesh ", describe(), ": a submesh needs the name of at least one dimension");
  std::vector<ProcessGroupPtr> groups;
  for (const auto& name : dim_names) groups.push_back(group(name));
  return std::make_shared<const DeviceMesh>(std::move(groups), dim_names);
}

ProcessGroupPtr DeviceMesh::flatten(const std::vector<std::string>& dim_names) const {
  if (dim_names.size() == 1) return group(dim_names[0]);
  ProcessGroupPtr& made = flattened_[dim_names];
  if (made != nullptr) return made;
  std::vector<int> members{0};  // as distances from the first one
  int to_first = 0;
  for (const auto& name : dim_names) {
    const int dim = dim_of(name);
    TORCH_CHECK(world_ != nullptr, "device mesh ", describe(), " was made from existing groups, and '", name,
                "' is to be one of several dimensions that count as one: make the mesh from the group of all its "
                "ranks and a shape");
    int stride = 1;
    for (int inner = dim + 1; inner < ndim(); ++inner) stride *= size(inner);
    to_first -= coordinate(dim) * stride;
    std::vector<int> farther;
    for (const int member : members) {
      for (int i = 0; i < size(dim); ++i) farther.push_back(member + i * stride);
    }
    members = std::move(farther);
  }
  const ProcessGroupPtr& all = world_ == nullptr ? groups_[0] : world_;
  for (int& member : members) member += all->rank() + to_first;
  std::ranges::sort(members);
  made = all->split(members, c10::str("dims ", c10::Join(" ", dim_names)));
  return made;
}

std::string DeviceMesh::describe() const {
  std::string text = "(";
  for (size_t dim = 0; dim < groups_.size(); ++dim) {
    if (dim > 0) text += ", ";
    if (!dim_names_.empty()) text += dim_names_[dim] + "=";
    text += std::to_string(groups_[dim]->size());
  }
  return text + ")";
}

}  // namespace megashard
