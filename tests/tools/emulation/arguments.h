// The command line of the programs that try cases: [--all] [--seed N] [--fault N].
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emu {

// What main returns: 0 if `count_wrong(all)` counts none.
template <typename Generator, typename Count>
int try_cases(int argc, char** argv, Generator& generator, const Count& count_wrong) {
  bool all = false;
  for (int i = 1; i < argc; ++i) {
    const bool has_value = i + 1 < argc;
    if (std::strcmp(argv[i], "--all") == 0) {
      all = true;
    } else if (has_value && std::strcmp(argv[i], "--seed") == 0) {
      const int seed = std::atoi(argv[++i]);
      generator.seed(seed);
      random_state = static_cast<uint32_t>(seed) * 2 + 1;  // never 0, which stays 0
    } else if (has_value && std::strcmp(argv[i], "--fault") == 0) {
      fault = std::atoi(argv[++i]);
    } else {
      std::fprintf(stderr, "usage: %s [--all] [--seed N] [--fault N]\n", argv[0]);
      return 2;
    }
  }
  return count_wrong(all) == 0 ? 0 : 1;
}

}  // namespace emu
