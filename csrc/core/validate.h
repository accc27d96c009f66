// Proves a ragged batch's metadata: one pass accepts; only a batch that fails
// it pays for a second pass that names every offender.
//
// Both passes read rows before num_seqs and live page slots only, whatever the
// arrays hold.  Accepting costs O(live page slots) on the best instruction set
// that there is, and allocates nothing after the first call of a thread with
// as many pages, rows and written slots.  Naming offenders costs O(bad rows'
// slots) more.
#ifndef PAGEMILL_CSRC_CORE_VALIDATE_H_
#define PAGEMILL_CSRC_CORE_VALIDATE_H_

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/core/batch_view.h"

namespace pagemill {

// Declared once in checks.def.
enum class CheckCode : int32_t {
#define PAGEMILL_CHECK(name, level, rule, remedy) name,
#include "csrc/core/checks.def"
#undef PAGEMILL_CHECK
};

enum class Level {
  kStructure,  // lengths, order, ranges, capacities
  kFull,       // + page ownership, decode and prefill rows, scalar memory
};

struct CheckInfo {
  CheckCode code;
  std::string_view name;  // as in checks.def
  Level level;
  std::string_view rule;
  std::string_view remedy;
};

// All checks, in the order of their codes.
std::span<const CheckInfo> AllChecks();

struct Violation {
  CheckCode code;
  int64_t sequence = -1;               // -1: not about one sequence
  int64_t index = -1;                  // place in the array at fault; -1: none
  int64_t value = 0;                   // what was found
  int64_t limit = 0;                   // what it was held against
  std::array<int64_t, 2> detail = {};  // what else the message tells

  std::string message() const;  // one sentence with names and values
  std::string_view remedy() const;

  friend bool operator==(const Violation&, const Violation&) = default;
};

// All violations: those of the whole batch first, then by sequence and index.
// Empty: valid.
std::vector<Violation> Validate(const BatchView& batch, Level level);

// The first violation with its remedy, a few more in a line each, and how many
// there are beyond: the text that every layer shows.
std::string FormatViolations(std::span<const Violation> violations);

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_VALIDATE_H_
