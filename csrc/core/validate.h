// Proves a ragged batch's metadata: one pass accepts; only a batch that fails
// it pays for a second pass that names every offender.
#ifndef PAGEMILL_CSRC_CORE_VALIDATE_H_
#define PAGEMILL_CSRC_CORE_VALIDATE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/core/batch_view.h"

namespace pagemill {

// Declared once in checks.def; the Python enum and the docs' table come from
// there as well.
enum class CheckCode : int32_t {
#define PAGEMILL_CHECK(name, level, summary, remedy) name,
#include "csrc/core/checks.def"
#undef PAGEMILL_CHECK
};

enum class Level {
  kStructure,  // lengths, order, ranges, capacities
  kFull,       // + page ownership, decode rows, read-only shared pages
};

struct Violation {
  CheckCode code;
  int64_t sequence = -1;  // -1: not about one sequence
  int64_t index = -1;     // place in the array at fault; -1: none
  int64_t value = 0;      // what was found
  int64_t limit = 0;      // what it was held against
  std::string message;    // one sentence with names and values
  std::string remedy;     // what to do about it
};

// All violations, in the order: whole-batch, then by sequence.  Empty: valid.
std::vector<Violation> Validate(const BatchView& batch, Level level);

// "<first message> <its remedy> (+N more: ...)": the text every layer shows.
std::string FormatViolations(const std::vector<Violation>& violations);

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_VALIDATE_H_
