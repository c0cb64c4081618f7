#include "framework/arguments/argument_view.h"

#include <c10/util/Exception.h>

#include <vector>

#include "framework/arguments/argument_table.h"
#include "framework/arguments/nearest_name.h"

namespace megashard {

ArgumentValue ArgumentView::value(const std::string& name) const {
  const Option* option = find_argument(name);
  if (option != nullptr && option->read) return option->read(*arguments_);
  std::vector<std::string> names;
  for (const auto& [each, of_it] : argument_values(*arguments_)) names.push_back(each);
  TORCH_CHECK_VALUE(false, "there is no argument \"", name, "\"", did_you_mean(name, names));
}

void ArgumentView::fail_on_type(const std::string& name, const ArgumentValue& value) {
  TORCH_CHECK_VALUE(false, "the argument ", name, " is ", argument_text(value), ", which has another type");
}

}  // namespace megashard
