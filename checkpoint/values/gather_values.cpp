#include "checkpoint/values/gather_values.h"

#include "checkpoint/values/pickle_reader.h"
#include "checkpoint/values/pickle_writer.h"
#include "parallel/collectives/agreement.h"

namespace megashard {

std::vector<Value> gather_values(const ProcessGroupPtr& group, const std::function<Value()>& work) {
  if (size_in(group) == 1) return {work()};
  const auto pickles = gather_or_throw(group, [&] { return write_pickle(work()); });
  std::vector<Value> values;
  for (const auto& pickle : pickles) values.push_back(read_pickle(pickle, "a message between ranks"));
  return values;
}

Value first_rank_value(const ProcessGroupPtr& group, const std::function<Value()>& work) {
  return gather_values(group, [&] { return rank_in(group) == 0 ? work() : Value(); }).front();
}

}  // namespace megashard
