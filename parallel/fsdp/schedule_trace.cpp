#include "parallel/fsdp/schedule_trace.h"

#include <c10/util/Exception.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "parallel/fsdp/fsdp_controls.h"

namespace megashard {

ScheduleTrace::ScheduleTrace(torch::nn::Module& root) : root_(root) {
  set_schedule_observer(root, [this](const char* what, const std::string& group) {
    const std::chrono::duration<double, std::micro> since = std::chrono::steady_clock::now() - start_;
    const std::lock_guard lock(mutex_);
    events_.push_back({what, group, since.count()});
  });
}

ScheduleTrace::~ScheduleTrace() { set_schedule_observer(root_, nullptr); }

std::vector<ScheduleTrace::Event> ScheduleTrace::events() const {
  const std::lock_guard lock(mutex_);
  return events_;
}

void ScheduleTrace::clear() {
  const std::lock_guard lock(mutex_);
  events_.clear();
}

void ScheduleTrace::write_chrome_trace(const std::string& path, int rank) const {
  using nlohmann::json;
  json list = json::array();
  list.push_back({{"ph", "M"}, {"name", "process_name"}, {"pid", rank}, {"args", {{"name", c10::str("rank ", rank)}}}});
  for (const auto& event : events()) {
    json entry = {{"pid", rank}, {"tid", 0}, {"ts", event.microseconds}, {"cat", "fsdp"}};
    const bool begins = event.what == "unshard";
    if (begins || event.what == "reshard") {  // a bar on the group's own line
      entry.update({{"ph", begins ? "b" : "e"}, {"name", event.group}, {"id", event.group}});
    } else {
      entry.update({{"ph", "i"}, {"s", "p"}, {"name", event.what + " " + event.group}});
    }
    list.push_back(std::move(entry));
  }
  std::ofstream file(path);
  file << json{{"traceEvents", list}, {"displayTimeUnit", "ms"}} << "\n";
  TORCH_CHECK(file.flush().good(), "the schedule trace could not be written to ", path,
              ": check the folder and the disk");
}

}  // namespace megashard
