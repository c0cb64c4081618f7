#include "launch/train/device_report.h"

#include <c10/util/Exception.h>

#include <string>
#include <utility>
#include <vector>

#include "parallel/device/cuda_module.h"

namespace megashard {
namespace {

std::string in_words(const std::vector<HostSync>& syncs) {
  int64_t all = 0;
  std::string each;
  for (const HostSync& sync : syncs) {
    all += sync.count;
    each += c10::str(each.empty() ? ": " : ", ", sync.count, " x ", sync.how, " in ", sync.place);
  }
  return std::to_string(all) + each;
}

class HostSyncLog : public Listener {
 public:
  HostSyncLog(const CudaModule& module, DiagnosticSink sink) : module_(module), sink_(std::move(sink)) {}
  void weights_updated(int64_t) override {
    sink_(Severity::kNotice,
          c10::str("host syncs of step ", ++steps_, " of this run: ", in_words(module_.take_host_syncs())));
  }

 private:
  CudaModule module_;
  DiagnosticSink sink_;
  int64_t steps_ = 0;
};

}  // namespace

std::shared_ptr<Listener> host_sync_log(c10::Device device, const DiagnosticSink& sink) {
  const CudaModule module = device.is_cpu() ? CudaModule{} : load_cuda_module();
  if (module.log_host_syncs == nullptr) {
    sink(Severity::kWarning, device.is_cpu() ? "--log-host-syncs has no effect on a CPU, for which no host waits"
                                             : "--log-host-syncs: this device cannot say what the host waits for; "
                                               "--device sim can");
    return {};
  }
  module.log_host_syncs(true);
  return std::make_shared<HostSyncLog>(module, sink);
}

void log_findings(c10::Device device, const DiagnosticSink& sink) {
  const CudaModule module = device.is_cpu() ? CudaModule{} : load_cuda_module();
  if (module.take_findings == nullptr) return;
  const auto findings = module.take_findings();
  sink(Severity::kNotice, "the device checked " + module.what_was_checked());
  std::string all;
  for (const std::string& finding : findings) all += "\n  " + finding;
  TORCH_CHECK(findings.empty(), "the device found ", findings.size(), " fault(s) in this program:", all);
}

}  // namespace megashard
