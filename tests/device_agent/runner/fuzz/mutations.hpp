// Changes to a case that keep enough of its form to reach what lies behind the checksums.
#pragma once

#include "cases.hpp"

namespace fuzz {

// Changes one file of a case. other: a case to take parts from.
void mutate(Case &files, const Case &other, Random &random);

} // namespace fuzz
