#include "models/moe/expert_forms.h"

#include <algorithm>

namespace megashard {
namespace {

struct Builder {
  const std::string& path;
  const ExpertSizes& sizes;
  const ExpertFiles& names;

  std::string up() const { return path + (sizes.gated ? "gate_up_proj" : "up_proj"); }
  std::string down() const { return path + "down_proj"; }

  StoredForm separate() const {
    const auto [experts, hidden, intermediate, gated] = sizes;
    StoredForm form{"separate", {}};
    for (int64_t e = 0; e < experts; ++e) {
      const auto weight = [&](const std::string& name) { return path + std::to_string(e) + "." + name + ".weight"; };
      const std::vector<int64_t> wide{intermediate, hidden};
      if (gated) form.parts.push_back(indexed_part(up(), {e, 0}, weight(names.gate), wide));
      form.parts.push_back(
          indexed_part(up(), gated ? std::vector{e, int64_t{1}} : std::vector{e}, weight(names.up), wide));
      form.parts.push_back(indexed_part(down(), {e}, weight(names.down), {hidden, intermediate}));
    }
    return form;
  }

  StoredForm packed() const {
    const auto [experts, hidden, intermediate, gated] = sizes;
    auto wide = gated ? whole_part(up(), up(), {experts, 2 * intermediate, hidden}, {experts, 2, intermediate, hidden})
                      : whole_part(up(), up(), {experts, intermediate, hidden});
    return {"packed", {std::move(wide), whole_part(down(), down(), {experts, hidden, intermediate})}};
  }

  StoredForm transposed() const {
    const auto [experts, hidden, intermediate, gated] = sizes;
    const std::vector<int64_t> narrow{experts, intermediate, hidden}, wide{experts, hidden, intermediate};
    auto up_part = gated ? whole_part(up(), up(), {experts, hidden, 2 * intermediate},
                                      {experts, hidden, 2, intermediate}, {0, 2, 3, 1})
                         : whole_part(up(), up(), wide, wide, {0, 2, 1});
    return {"transposed", {std::move(up_part), whole_part(down(), down(), narrow, narrow, {0, 2, 1})}};
  }
};

}  // namespace

WeightGroup expert_forms(const std::string& path, const ExpertSizes& sizes, const ExpertFiles& published) {
  const Builder builder{path, sizes, published};
  const auto [experts, hidden, intermediate, gated] = sizes;
  const std::vector<int64_t> up =
      gated ? std::vector{experts, int64_t{2}, intermediate, hidden} : std::vector{experts, intermediate, hidden};
  WeightGroup group{{{builder.up(), up}, {builder.down(), {experts, hidden, intermediate}}},
                    {builder.packed(), builder.transposed(), builder.separate()}};
  const bool is_square = hidden == (gated ? 2 : 1) * intermediate || hidden == intermediate;
  const auto form =
      published.form == ExpertFiles::Form::kTransposed && is_square ? ExpertFiles::Form::kPacked : published.form;
  const auto first = group.forms.begin() + static_cast<std::ptrdiff_t>(form);
  std::rotate(group.forms.begin(), first, first + 1);
  return group;
}

}  // namespace megashard
