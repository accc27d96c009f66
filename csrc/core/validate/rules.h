// Rules about a whole batch, for both passes.
#ifndef PAGEMILL_CSRC_CORE_VALIDATE_RULES_H_
#define PAGEMILL_CSRC_CORE_VALIDATE_RULES_H_

#include <cstdint>
#include <limits>

#include "csrc/core/batch_view.h"

namespace pagemill::internal {

inline constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

inline bool IsSize(int64_t size) { return size > 0 && size <= kInt32Max; }

// Without these no row can be read.
bool SizesHold(const BatchView& batch);

bool DistributionHolds(const BatchView& batch);
// The ends of cu_q_lens; whether it falls in between is about rows.
bool CuQLensHold(const BatchView& batch);
// The distribution must hold.
bool DecodeAndPrefillRowsHold(const BatchView& batch);

// What a kernel keeps in scalar memory, where an array's last dimension is
// padded to kSmemLanes entries.
inline constexpr int64_t kSmemLanes = 128;
int64_t SmemBytes(const BatchView& batch);
bool SmemBudgetHolds(const BatchView& batch);

// slot_mapping of a row's tokens and of the dead ones.  The row's slots must
// be sound and its tokens within the buffer.
bool RowTokensHold(const BatchView& batch, int64_t seq);
bool DeadTokensHold(const BatchView& batch);

bool TokensInBuffer(const BatchView& batch, int64_t seq);

}  // namespace pagemill::internal

#endif  // PAGEMILL_CSRC_CORE_VALIDATE_RULES_H_
