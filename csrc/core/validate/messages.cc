// What each violation says, made when somebody reads it.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "csrc/core/str_cat.h"
#include "csrc/core/validate.h"
#include "csrc/core/validate/rules.h"

namespace pagemill {
namespace {

// As the TPU compiler writes it: 1.06M.
std::string Mebibytes(int64_t bytes) {
  const int64_t hundredths = (bytes * 100 + (1 << 19)) >> 20;
  const int64_t fraction = hundredths % 100;
  return StrCat(hundredths / 100, fraction < 10 ? ".0" : ".", fraction, "M");
}

std::string Product(const Violation& v) {
  const bool cache = v.detail[1] > 0;
  return StrCat(cache ? "total_num_pages" : "max_num_seqs", "=", v.detail[0],
                " times ", cache ? "page_size" : "pages_per_seq", "=",
                std::abs(v.detail[1]), " is ", v.value,
                ", which does not fit int32.");
}

std::string NumSeqs(const Violation& v) {
  return v.value < 0
             ? StrCat("num_seqs[0]=", v.value, " must be in range [0, ",
                      v.detail[0], "].")
             : StrCat("num_seqs[0]=", v.value,
                      " must be less or equal to max_num_seqs=", v.detail[0],
                      ".");
}

std::string SmemBudget(const Violation& v) {
  return StrCat("Used ", Mebibytes(v.value), " of ", Mebibytes(v.limit),
                " smem: page_indices of ", v.detail[0], " rows and ",
                v.detail[1], " columns, kv_lens and cu_q_lens take ", v.value,
                " bytes, more than smem_budget_bytes=", v.limit, ".");
}

std::string WrittenTwice(const Violation& v) {
  return v.limit == v.sequence
             ? StrCat("page ", v.value,
                      " is written through two slots of sequence ", v.sequence,
                      ": page_indices[", v.sequence, ", ", v.index,
                      "] repeats it.")
             : StrCat("page ", v.value, " is written this step by sequence ",
                      v.limit, " and sequence ", v.sequence, ": page_indices[",
                      v.sequence, ", ", v.index, "].");
}

std::string RowTooShort(const Violation& v) {
  return StrCat("pages_per_seq=", v.limit,
                " must be greater or equal to min_pages_per_seq=", v.value,
                " given max_kv_len=", v.detail[0],
                " and page_size=", v.detail[1],
                ". That is the length of sequence ", v.sequence, ".");
}

}  // namespace

std::string Violation::message() const {
  switch (code) {
    case CheckCode::kSize: {
      constexpr const char* kNames[] = {"page_size", "total_num_pages",
                                        "max_num_tokens"};
      return StrCat(kNames[detail[0]], "=", value, " must be in range (0, ",
                    limit, "].");
    }
    case CheckCode::kInt32Product:
      return Product(*this);
    case CheckCode::kNumSeqs:
      return NumSeqs(*this);
    case CheckCode::kDistribution:
      return StrCat("distribution=(", detail[0], ", ", detail[1], ", ", value,
                    ") must satisfy 0 <= decode <= prefill <= total and total "
                    "== num_seqs=",
                    limit, ".");
    case CheckCode::kCuQLensStart:
      return StrCat("cu_q_lens[0]=", value, " must be 0.");
    case CheckCode::kCuQLensFalls:
      return StrCat("cu_q_lens falls at sequence ", sequence, ": it starts at ",
                    limit, " and ends at ", value, ".");
    case CheckCode::kTotalTokens:
      return StrCat("Total q tokens ", value,
                    " must be less or equal to max_num_batched_tokens=", limit,
                    ". Sequence ", detail[0],
                    " is the first that ends past the buffer, at ", detail[1],
                    ".");
    case CheckCode::kKvLenNegative:
      return StrCat("kv_len=", value, " must not be negative at sequence ",
                    sequence, ".");
    case CheckCode::kQueryExceedsKv:
      return StrCat("q_len=", value, " must be less or equal to kv_len=", limit,
                    " at sequence ", sequence, ".");
    case CheckCode::kRowTooShort:
      return RowTooShort(*this);
    case CheckCode::kPageOutOfRange:
      return StrCat("page_indices[", sequence, ", ", index, "]=", value,
                    " must be in range [0, ", limit, ") at sequence ", sequence,
                    ".");
    case CheckCode::kDecodeRow:
      return StrCat("q_len=", value, " must be 1 at sequence ", sequence,
                    ", which is in the decode range [0, ", detail[0], ").");
    case CheckCode::kPrefillRow:
      return StrCat("q_len=", value, " must be ", limit, " at sequence ",
                    sequence, ", as for all of the prefill range [", detail[0],
                    ", ", detail[1], ").");
    case CheckCode::kPageWrittenTwice:
      return WrittenTwice(*this);
    case CheckCode::kSharedPageWritten:
      return StrCat("page ", value, " is written this step by sequence ", limit,
                    " while sequence ", sequence, " reads it: page_indices[",
                    sequence, ", ", index, "].");
    case CheckCode::kSlotMapping:
      return StrCat("slot_mapping[", index, "]=", value, " must be ", limit,
                    sequence < 0 ? std::string(" for a dead token.")
                                 : StrCat(" at sequence ", sequence, "."));
    case CheckCode::kSmemBudget:
      return SmemBudget(*this);
  }
  return "";
}

}  // namespace pagemill
