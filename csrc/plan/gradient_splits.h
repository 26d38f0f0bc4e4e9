// Into how many parts the sum of the gradient of a bias, or of slopes, is divided. No CUDA, no torch.
#pragma once

#include "table.h"

namespace flash_ext::plans {

// Into how many parts the sum of a gradient that has rows of its own is divided. A CTA owns 128 of them, and 128
// columns or their sum. It takes a step for each head and batch entry that share them. Steps set the time; adding up a
// part of a matrix costs a fiftieth of one.
inline int splits_of_rows(const BiasGradient& g, const Problem& p, const DeviceInfo& d, int64_t most) {
  const int64_t steps = int64_t{1} * (g.batch == 1 ? p.batch : 1) * (g.heads == 1 ? p.num_heads : 1);
  const int64_t owners = g.tiles(128, 128);
  most = std::min({steps / 4, most, int64_t{(g.sum_cols ? 2 : 1) * d.num_sms}});
  int best = 1;
  double best_time = static_cast<double>(steps) * static_cast<double>((owners + d.num_sms - 1) / d.num_sms);
  for (int parts = 2; parts <= most; ++parts) {
    const int64_t waves = (owners * parts + d.num_sms - 1) / d.num_sms;
    const double time = static_cast<double>(waves * ((steps + parts - 1) / parts)) + (g.sum_cols ? 0 : 0.02) * parts;
    if (time < best_time) best = parts, best_time = time;
  }
  return best;
}

// Two CTAs an SM, of at least 32 columns, are enough to fill the GPU. Parts have 64 MB at most.
inline int splits_of_gradient(const BiasGradient& g, const Problem& p, const DeviceInfo& d) {
  const int64_t most = (int64_t{16} << 20) / std::max<int64_t>(int64_t{1} * g.batch * g.heads * g.rows * g.cols, 1);
  if (!g.sum_rows) return splits_of_rows(g, p, d, most);
  const int64_t owners = int64_t{1} * g.batch * g.heads * (g.sum_cols ? 1 : (g.cols + 31) / 32);
  return static_cast<int>(std::max<int64_t>(1, std::min(most, 2 * d.num_sms / std::max<int64_t>(owners, 1))));
}

}  // namespace flash_ext::plans
