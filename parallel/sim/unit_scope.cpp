#include "parallel/sim/unit_scope.h"

#include <ATen/record_function.h>

#include <vector>

namespace megashard::sim {
namespace {

thread_local std::vector<std::string> scopes;

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& function) {
  scopes.emplace_back(function.name());
  return nullptr;
}
void on_end(const at::RecordFunction&, at::ObserverContext*) {
  if (!scopes.empty()) scopes.pop_back();
}

}  // namespace

void watch_unit_scopes() {
  at::addGlobalCallback(at::RecordFunctionCallback(&on_start, &on_end).scopes({at::RecordScope::USER_SCOPE}));
}

const std::string& current_unit() {
  static const std::string none;
  return scopes.empty() ? none : scopes.back();
}

}  // namespace megashard::sim
