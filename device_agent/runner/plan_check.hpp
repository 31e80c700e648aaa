// Checks that a plan's numbers fit one another, so that no index leaves its array whatever the file says.
#pragma once

#include "plan.hpp"

namespace mobizo {

// Throws std::runtime_error if a setting is out of its range. The other records are read by these settings.
void check_settings(const Settings &settings);

// Throws std::runtime_error if a record is missing, has another length than the settings ask for, has an index that
// points to nothing, or a number that is not finite.
void check_plan(const Plan &plan);

// The product of sizes from 0. Throws std::runtime_error if it is larger than anything that a plan can hold.
size_t product(std::initializer_list<int64_t> sizes);

} // namespace mobizo
