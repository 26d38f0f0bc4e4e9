// What this binary was built from and for. No torch, no CUDA headers.
#pragma once

namespace flash_ext {

struct BuildInfo {
  const char* version;  // of flash_ext
  const char* git_sha;  // short commit, "-dirty" when the tree was changed, "" outside a repository
  const char* torch;    // whose headers and libraries it was built with, e.g. "2.13.0+cpu"
  const char* cuda;     // toolkit, e.g. "13.0"
  const char* archs;    // machine code and PTX inside, e.g. "8.0 8.0+PTX 9.0a"
  const char* flags;    // of nvcc
  const char* variant;  // "release", "debug" or "mutant<n>"
};

const BuildInfo& build_info();

}  // namespace flash_ext
