#include "csrc/core/validate.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/core/batch_view.h"
#include "csrc/core/isa.h"
#include "csrc/core/status.h"
#include "csrc/core/str_cat.h"
#include "csrc/core/validate/locate.h"
#include "csrc/core/validate/passes.h"
#include "csrc/core/validate/rules.h"
#include "csrc/core/validate/scan.h"
#include "csrc/core/validate/scanners.h"
#include "csrc/core/validate/table_scan.h"

namespace pagemill {
namespace {

constexpr size_t kMoreShown = 8;

constexpr CheckInfo kChecks[] = {
#define PAGEMILL_CHECK(name, level, rule, remedy) \
  {CheckCode::name, #name, Level::level, rule, remedy},
#include "csrc/core/checks.def"
#undef PAGEMILL_CHECK
};

// An unknown name in PAGEMILL_CPU_ISA is for the operations to report, which
// can; checks give the same answer on every instruction set.
const internal::TableScanner& ScannerOfChecks() {
  static const internal::TableScanner& scanner = []() -> const auto& {
    const Result<Isa> chosen = DefaultIsa();
    return internal::TableScannerFor(chosen.ok() ? chosen.value()
                                                 : Isas().front());
  }();
  return scanner;
}

bool Holds(const BatchView& batch, Level level, const internal::Scan& scan) {
  return scan.clean() && internal::DistributionHolds(batch) &&
         internal::CuQLensHold(batch) &&
         (level == Level::kStructure ||
          (internal::SmemBudgetHolds(batch) &&
           internal::DecodeAndPrefillRowsHold(batch)));
}

}  // namespace

bool internal::Accepts(const BatchView& batch, Level level,
                       const TableScanner& scanner) {
  return SizesHold(batch) && Holds(batch, level, Scan(batch, level, scanner));
}

std::vector<Violation> internal::Locate(const BatchView& batch, Level level,
                                        const TableScanner& scanner) {
  if (!SizesHold(batch)) return LocateSizes(batch);
  Scan scan(batch, level, scanner);
  return LocateRows(batch, level, scan);
}

std::span<const CheckInfo> AllChecks() { return kChecks; }

std::string_view Violation::remedy() const {
  return kChecks[static_cast<size_t>(code)].remedy;
}

std::vector<Violation> Validate(const BatchView& batch, Level level) {
  if (!internal::SizesHold(batch)) return internal::LocateSizes(batch);
  internal::Scan scan(batch, level, ScannerOfChecks());
  if (Holds(batch, level, scan)) return {};
  return internal::LocateRows(batch, level, scan);
}

std::string FormatViolations(std::span<const Violation> violations) {
  if (violations.empty()) return "no violations";
  const auto line = [](const Violation& v) {
    return StrCat(v.message(), " (", v.remedy(), ")");
  };
  std::string text = line(violations.front());
  const size_t more = violations.size() - 1;
  for (size_t i = 1; i <= std::min(more, kMoreShown); ++i) {
    text += StrCat("\n  also: ", violations[i].message());
  }
  if (more > kMoreShown) {
    text += StrCat("\n  and ", more - kMoreShown, " more.");
  }
  return text;
}

}  // namespace pagemill
