#pragma once

#include <initializer_list>

#include "framework/arguments/argument_table.h"

namespace megashard::detail {

/// A flag of Megatron or MindSpeed without a field of Arguments.
struct ForeignFlag {
  const char* flag;
  int words = 0;
  const char* neutral = "";  // of refused ones: Megatron's default, or what is done here anyway
  const char* other = "";    // another spelling
};

inline constexpr int kAny = Option::kAnyNumber;

/// Rows for flags that share a reason.
class ForeignFlags {
 public:
  explicit ForeignFlags(std::vector<Option>& rows)
      : accepted_("accepted, without effect here", rows), refused_("known, but refused", rows) {}
  void accept(const char* reason, std::initializer_list<ForeignFlag> flags);
  void refuse(const char* reason, std::initializer_list<ForeignFlag> flags);

 private:
  OptionGroup accepted_, refused_;
};

// Without effect are flags that change neither numbers nor memory nor what is written, or that only
// tune what another, refused flag turns on.
void accept_flags_of_speed(ForeignFlags& flags);           // argument_table_accepted.cpp
void accept_flags_of_refused_ones(ForeignFlags& flags);    // argument_table_accepted_parts.cpp
void accept_flags_of_other_programs(ForeignFlags& flags);  // argument_table_other_programs.cpp
void refuse_flags_of_runs(ForeignFlags& flags);            // argument_table_refused.cpp
void refuse_flags_of_networks(ForeignFlags& flags);        // argument_table_refused_networks.cpp

}  // namespace megashard::detail
