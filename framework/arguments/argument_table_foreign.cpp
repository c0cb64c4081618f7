#include "framework/arguments/argument_table_foreign.h"

namespace megashard::detail {

namespace {

void name_again(Option& option, const ForeignFlag& flag) {
  if (*flag.other != '\0') option.alias(flag.other);
}

}  // namespace

void ForeignFlags::accept(const char* reason, std::initializer_list<ForeignFlag> flags) {
  for (const auto& each : flags) name_again(accepted_.without_effect(each.flag, each.words, reason), each);
}

void ForeignFlags::refuse(const char* reason, std::initializer_list<ForeignFlag> flags) {
  for (const auto& each : flags) name_again(refused_.refused(each.flag, each.words, reason).except(each.neutral), each);
}

void add_foreign_options(std::vector<Option>& rows) {
  ForeignFlags flags(rows);
  accept_flags_of_speed(flags);
  accept_flags_of_refused_ones(flags);
  accept_flags_of_other_programs(flags);
  refuse_flags_of_runs(flags);
  refuse_flags_of_networks(flags);
}

}  // namespace megashard::detail
