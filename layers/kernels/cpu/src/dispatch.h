// The instruction set in use.
#pragma once
#include "kernels.h"

namespace ridgeline {
const InstructionSet& chosen();
}
