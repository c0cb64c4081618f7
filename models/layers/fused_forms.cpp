#include "models/layers/fused_forms.h"

#include <utility>

namespace megashard {

WeightGroup fused_forms(const std::string& path, const std::vector<LayerRows>& layers, const std::string& fused,
                        int64_t inputs, bool bias) {
  int64_t all = 0;
  for (const auto& layer : layers) all += layer.rows;
  WeightGroup group;
  StoredForm together{"fused", {}}, apart{"separate", {}};
  const auto add = [&](const std::string& parameter, bool is_matrix) {
    const auto sizes = [&](int64_t rows) {
      return is_matrix ? std::vector<int64_t>{rows, inputs} : std::vector<int64_t>{rows};
    };
    int64_t first = 0;
    for (const auto& [name, rows] : layers) {
      const auto tensor = path + name + parameter;
      group.tensors.push_back({tensor, sizes(rows)});
      apart.parts.push_back(whole_part(tensor, tensor, sizes(rows)));
      auto part = rows_part(tensor, 0, rows, path + fused + parameter, sizes(all), first);
      together.parts.push_back(std::move(part));
      first += rows;
    }
  };
  add(".weight", /*is_matrix=*/true);
  if (bias) add(".bias", /*is_matrix=*/false);
  group.forms = {std::move(together), std::move(apart)};
  return group;
}

}  // namespace megashard
