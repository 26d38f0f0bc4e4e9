// What a profiler sees: prints every NVTX range that a process opens and closes in a domain. Loaded through
// NVTX_INJECTION64_PATH by tests/api/test_log.py.
#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#include <string>

namespace {

std::string* domain_name(nvtxDomainHandle_t domain) { return reinterpret_cast<std::string*>(domain); }

nvtxDomainHandle_t create(const char* name) { return reinterpret_cast<nvtxDomainHandle_t>(new std::string(name)); }

int push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
  std::printf("open %s %s\n", domain_name(domain)->c_str(), event->message.ascii);
  return 0;
}

int pop(nvtxDomainHandle_t domain) {
  std::printf("close %s\n", domain_name(domain)->c_str());
  return 0;
}

template <class Function>
void set(NvtxFunctionTable table, int which, Function* function) {
  *table[which] = reinterpret_cast<NvtxFunctionPointer>(function);
}

}  // namespace

extern "C" int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_export_table) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(get_export_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (callbacks == nullptr || callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) == 0) {
    return 0;
  }
  set(table, NVTX_CBID_CORE2_DomainCreateA, create);
  set(table, NVTX_CBID_CORE2_DomainRangePushEx, push);
  set(table, NVTX_CBID_CORE2_DomainRangePop, pop);
  return 1;
}
