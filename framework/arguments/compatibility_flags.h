#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "framework/arguments/option_group.h"

namespace megashard::detail {

/// A flag of Megatron or MindSpeed without a field in Arguments.
struct CompatibilityFlag {
  const char* flag;
  int nargs = 0;
  const char* allowed_value = "";  // refused flags: Megatron's default, or the behaviour here
  const char* other = "";          // another spelling
};

inline constexpr int kAny = Option::kAnyNumber;

/// Adds rows for flags that share a reason.
class CompatibilityFlags {
 public:
  explicit CompatibilityFlags(std::vector<Option>& rows)
      : accepted_("accepted, without effect here", rows), refused_("known, but refused", rows) {}
  void accept(const std::string& reason, std::initializer_list<CompatibilityFlag> flags);
  void refuse(const std::string& reason, std::initializer_list<CompatibilityFlag> flags);

 private:
  OptionGroup accepted_, refused_;
};

/// Adds flags that change neither numerics nor memory nor output, or that only tune the effect of another, refused
/// flag.
void add_compatibility_flags(std::vector<Option>& rows);
void accept_flags_of_refused_ones(CompatibilityFlags& flags);    // inactive_flags.cpp
void accept_flags_of_other_programs(CompatibilityFlags& flags);  // inactive_flags.cpp
/// Adds flags for unsupported features.
void add_refused_flags(std::vector<Option>& rows);

}  // namespace megashard::detail
