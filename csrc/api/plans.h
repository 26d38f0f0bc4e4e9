// Plans for tests and tools (api/plans.cpp).
#pragma once

#include <pybind11/pybind11.h>

namespace flash_ext {

// Adds plan, plan_rows, last_launch, done_launches, device_facts, path_names and the switches to a module.
void bind_plans(pybind11::module_& m);

}  // namespace flash_ext
