#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "framework/arguments/option_group.h"

namespace megashard::detail {

/// A flag of Megatron or MindSpeed without a field of Arguments.
struct CompatibilityFlag {
  const char* flag;
  int nargs = 0;
  const char* allowed_value = "";  // of refused ones: Megatron's default, or what is done here anyway
  const char* other = "";          // another spelling
};

inline constexpr int kAny = Option::kAnyNumber;

/// Rows for flags that share a reason.
class CompatibilityFlags {
 public:
  explicit CompatibilityFlags(std::vector<Option>& rows)
      : accepted_("accepted, without effect here", rows), refused_("known, but refused", rows) {}
  void accept(const std::string& reason, std::initializer_list<CompatibilityFlag> flags);
  void refuse(const std::string& reason, std::initializer_list<CompatibilityFlag> flags);

 private:
  OptionGroup accepted_, refused_;
};

/// Flags that change neither numbers nor memory nor what is written, or that only tune what another, refused flag
/// turns on.
void add_compatibility_flags(std::vector<Option>& rows);
void accept_flags_of_refused_ones(CompatibilityFlags& flags);    // inactive_flags.cpp
void accept_flags_of_other_programs(CompatibilityFlags& flags);  // inactive_flags.cpp
/// Flags that ask for what this program does not do.
void add_refused_flags(std::vector<Option>& rows);

}  // namespace megashard::detail
