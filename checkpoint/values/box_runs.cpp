#include "checkpoint/values/box_runs.h"

#include <cstddef>
#include <vector>

namespace megashard {

void for_each_run(c10::IntArrayRef whole, c10::IntArrayRef offsets, c10::IntArrayRef sizes,
                  const std::function<void(int64_t in_whole, int64_t in_box, int64_t elements)>& visit) {
  for (const int64_t size : sizes) {
    if (size == 0) return;
  }
  int64_t run = 1;
  size_t outer = whole.size();  // number of dimensions to iterate over
  while (outer > 0) {
    run *= sizes[--outer];
    if (sizes[outer] != whole[outer]) break;
  }
  std::vector<int64_t> at(outer, 0);
  int64_t in_box = 0;
  while (true) {
    int64_t in_whole = 0;
    for (size_t i = 0; i < whole.size(); ++i) in_whole = in_whole * whole[i] + offsets[i] + (i < outer ? at[i] : 0);
    visit(in_whole, in_box, run);
    in_box += run;
    size_t axis = outer;
    while (axis > 0 && ++at[axis - 1] == sizes[axis - 1]) at[--axis] = 0;
    if (axis == 0) return;
  }
}

}  // namespace megashard
