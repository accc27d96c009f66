#include "csrc/core/plan.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <new>
#include <utility>
#include <vector>

#include "csrc/core/str_cat.h"

namespace pagemill {
namespace {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
constexpr size_t kAlignment = 64;

// Sets order and cu_q_lens; returns how many rows decode.
int32_t OrderRows(std::span<const int64_t> counts, Plan& plan) {
  int32_t row = 0;
  const auto take = [&](bool decode) {
    for (size_t i = 0; i < counts.size(); ++i) {
      if ((counts[i] == 1) != decode) continue;
      plan.order[row] = static_cast<int32_t>(i);
      plan.cu_q_lens[row + 1] =
          plan.cu_q_lens[row] + static_cast<int32_t>(counts[i]);
      ++row;
    }
  };
  plan.cu_q_lens[0] = 0;
  take(true);
  const int32_t decodes = row;
  take(false);
  std::fill(plan.cu_q_lens.data() + row + 1,
            plan.cu_q_lens.data() + plan.cu_q_lens.size(), plan.cu_q_lens[row]);
  return decodes;
}

void WriteRow(const PagePool::Appended& seq, int64_t page_size, int32_t row,
              Plan& plan) {
  const int64_t width = plan.sizes.pages_per_seq;
  std::copy(seq.pages.begin(), seq.pages.end(),
            plan.page_indices.data() + row * width);
  plan.kv_lens[row] = static_cast<int32_t>(seq.length);
  const int64_t begin = plan.cu_q_lens[row], end = plan.cu_q_lens[row + 1];
  int64_t position = seq.length - (end - begin);
  for (int64_t token = begin; token < end; ++token, ++position) {
    const int64_t page = seq.pages[position / page_size];
    plan.slot_mapping[token] =
        static_cast<int32_t>(page * page_size + position % page_size);
  }
}

void FillDead(int64_t live_rows, int64_t live_tokens, Plan& plan) {
  std::fill(plan.kv_lens.data() + live_rows,
            plan.kv_lens.data() + plan.kv_lens.size(), 0);
  std::fill(plan.slot_mapping.data() + live_tokens,
            plan.slot_mapping.data() + plan.slot_mapping.size(), -1);
}

Plan MakePlan(const PlanSizes& sizes, size_t requests) {
  Plan plan{
      .kv_lens = Int32Array(sizes.max_num_seqs),
      .page_indices = Int32Array(sizes.max_num_seqs * sizes.pages_per_seq),
      .cu_q_lens = Int32Array(sizes.max_num_seqs + 1),
      .num_seqs = Int32Array(1),
      .distribution = Int32Array(3),
      .slot_mapping = Int32Array(sizes.max_num_tokens),
      .order = Int32Array(static_cast<int64_t>(requests)),
      .sizes = sizes};
  std::fill_n(plan.page_indices.data(), plan.page_indices.size(), 0);
  return plan;
}

}  // namespace

Int32Array::Int32Array(int64_t size) : size_(size) {
  const size_t bytes = static_cast<size_t>(size) * sizeof(int32_t);
  const size_t rounded = (bytes + kAlignment) / kAlignment * kAlignment;
  data_.reset(static_cast<int32_t*>(std::aligned_alloc(kAlignment, rounded)));
  if (data_ == nullptr) throw std::bad_alloc();
}

BatchView Plan::View(const PagePool& pool) const {
  return {.kv_lens = kv_lens.data(),
          .page_indices = page_indices.data(),
          .cu_q_lens = cu_q_lens.data(),
          .distribution = distribution.data(),
          .slot_mapping = slot_mapping.data(),
          .num_seqs = num_seqs[0],
          .max_num_seqs = sizes.max_num_seqs,
          .pages_per_seq = sizes.pages_per_seq,
          .page_size = pool.page_size(),
          .total_num_pages = pool.total_num_pages(),
          .max_num_tokens = sizes.max_num_tokens};
}

Result<Planner> Planner::Create(std::shared_ptr<PagePool> pool,
                                PlanSizes sizes) {
  const std::pair<const char*, int64_t> named[] = {
      {"max_num_tokens", sizes.max_num_tokens},
      {"max_num_seqs", sizes.max_num_seqs},
      {"pages_per_seq", sizes.pages_per_seq}};
  for (const auto& [name, size] : named) {
    if (size < 1 || size > kInt32Max) {
      return InvalidArgument(
          StrCat(name, "=", size, " must be in range [1, ", kInt32Max, "]."));
    }
  }
  if (sizes.max_num_seqs * sizes.pages_per_seq > kInt32Max) {
    return InvalidArgument(StrCat(
        "max_num_seqs=", sizes.max_num_seqs, " times pages_per_seq=",
        sizes.pages_per_seq, " is ", sizes.max_num_seqs * sizes.pages_per_seq,
        " page slots, which do not fit int32. Use fewer or larger pages."));
  }
  return Planner(std::move(pool), sizes);
}

Status Planner::CheckCounts(std::span<const int64_t> counts) const {
  if (static_cast<int64_t>(counts.size()) > sizes_.max_num_seqs) {
    return InvalidArgument(StrCat(
        counts.size(),
        " sequences must be less or equal to "
        "max_num_seqs=",
        sizes_.max_num_seqs, ". Split the step, or use a larger planner."));
  }
  int64_t total = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] < 1) {
      return InvalidArgument(StrCat("requests[", i, "] brings ", counts[i],
                                    " tokens; it must bring at least 1. "
                                    "Leave it out of the step."));
    }
    if (counts[i] > sizes_.max_num_tokens - total) {
      return InvalidArgument(
          StrCat("requests[", i, "] brings ", counts[i], " tokens after ",
                 total, " of the requests before it, more than max_num_tokens=",
                 sizes_.max_num_tokens,
                 ". Split the prompt into chunks, or use a larger planner."));
    }
    total += counts[i];
  }
  return Status();
}

Result<Plan> Planner::PlanStep(std::span<const SequenceHandle> handles,
                               std::span<const int64_t> counts) {
  if (Status status = CheckCounts(counts); !status.ok()) return status;
  Plan plan = MakePlan(sizes_, counts.size());
  const int32_t decodes = OrderRows(counts, plan);
  std::vector<int32_t> row_of(counts.size());
  for (int64_t row = 0; row < plan.order.size(); ++row) {
    row_of[plan.order[row]] = static_cast<int32_t>(row);
  }
  const Status status =
      pool_->Append(handles, counts, sizes_.pages_per_seq,
                    [&](size_t i, const PagePool::Appended& seq) {
                      WriteRow(seq, pool_->page_size(), row_of[i], plan);
                    });
  if (!status.ok()) return status;
  const int32_t rows = static_cast<int32_t>(counts.size());
  FillDead(rows, plan.cu_q_lens[rows], plan);
  plan.num_seqs[0] = rows;
  plan.distribution[0] = plan.distribution[1] = decodes;
  plan.distribution[2] = rows;
  return plan;
}

}  // namespace pagemill
