#include "csrc/core/plan/planner.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <numeric>
#include <utility>

#include "csrc/core/str_cat.h"

namespace pagemill {
namespace {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxRing = 64;

Status CheckRange(const char* name, int64_t value, int64_t max) {
  if (value >= 1 && value <= max) return Status();
  return InvalidArgument(
      StrCat(name, "=", value, " must be in range [1, ", max, "]."));
}

Status CheckBuckets(const char* name, std::vector<int64_t>& buckets,
                    const char* size_name, int64_t size) {
  if (buckets.empty()) buckets = {size};
  for (size_t i = 0; i < buckets.size(); ++i) {
    const int64_t least = i == 0 ? 1 : buckets[i - 1] + 1;
    if (buckets[i] < least) {
      return InvalidArgument(StrCat(name, "[", i, "]=", buckets[i],
                                    " must be at least ", least,
                                    ": buckets are positive and ascend."));
    }
  }
  if (buckets.back() == size) return Status();
  return InvalidArgument(StrCat(name, " ends with ", buckets.back(),
                                ", which must be ", size_name, "=", size,
                                ". Let the largest bucket be the size."));
}

Status CheckOptions(PlannerOptions& o, const PagePool& pool) {
  const std::pair<const char*, int64_t> named[] = {
      {"max_num_tokens", o.sizes.max_num_tokens},
      {"max_num_seqs", o.sizes.max_num_seqs},
      {"pages_per_seq", o.sizes.pages_per_seq}};
  for (const auto& [name, size] : named) {
    if (Status s = CheckRange(name, size, kInt32Max); !s.ok()) return s;
  }
  if (Status s = CheckRange("ring", o.ring, kMaxRing); !s.ok()) return s;
  const int64_t slots = o.sizes.max_num_seqs * o.sizes.pages_per_seq;
  if (slots > kInt32Max / pool.num_groups()) {
    return InvalidArgument(StrCat(
        "max_num_seqs=", o.sizes.max_num_seqs,
        " times pages_per_seq=", o.sizes.pages_per_seq, " is ", slots,
        " page slots, which do not fit int32. Use fewer or larger pages."));
  }
  if (o.prefill_chunk < 0 || o.prefill_chunk > o.sizes.max_num_tokens) {
    return InvalidArgument(StrCat(
        "prefill_chunk=", o.prefill_chunk,
        " must be in range [0, max_num_tokens=", o.sizes.max_num_tokens, "]."));
  }
  if (Status s = CheckBuckets("token_buckets", o.token_buckets,
                              "max_num_tokens", o.sizes.max_num_tokens);
      !s.ok()) {
    return s;
  }
  return CheckBuckets("seq_buckets", o.seq_buckets, "max_num_seqs",
                      o.sizes.max_num_seqs);
}

int32_t BucketOf(const std::vector<int64_t>& buckets, int64_t size) {
  return static_cast<int32_t>(
      std::lower_bound(buckets.begin(), buckets.end(), size) - buckets.begin());
}

Status InUse() {
  return Unavailable(
      "the planner is in use by another thread. Give each thread its own.");
}

}  // namespace

Result<std::unique_ptr<Planner>> Planner::Create(std::shared_ptr<PagePool> pool,
                                                 PlannerOptions options) {
  if (Status s = CheckOptions(options, *pool); !s.ok()) return s;
  return std::unique_ptr<Planner>(
      new Planner(std::move(pool), std::move(options)));
}

Planner::Planner(std::shared_ptr<PagePool> pool, PlannerOptions options)
    : pool_(std::move(pool)),
      options_(std::move(options)),
      order_(options_.prefill_chunk, options_.keep_rows),
      layouts_(options_.sizes.max_num_seqs),
      lengths_(options_.sizes.max_num_seqs),
      mirror_(options_.track_delta ? options_.sizes.max_num_seqs : 0) {
  buffers_.resize(options_.ring);  // each made when a step first needs it
}

Status Planner::CheckCounts(std::span<const int32_t> counts, int64_t total,
                            int32_t least) const {
  const PlanSizes& sizes = options_.sizes;
  if (static_cast<int64_t>(counts.size()) > sizes.max_num_seqs) {
    return InvalidArgument(StrCat(
        counts.size(), " sequences must be less or equal to max_num_seqs=",
        sizes.max_num_seqs, ". Split the step, or use a larger planner."));
  }
  if (least >= 1 && total <= sizes.max_num_tokens) return Status();
  total = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] < 1) {
      return InvalidArgument(StrCat("requests[", i, "] brings ", counts[i],
                                    " tokens; it must bring at least 1. "
                                    "Leave it out of the step."));
    }
    if (counts[i] > sizes.max_num_tokens - total) {
      return InvalidArgument(
          StrCat("requests[", i, "] brings ", counts[i], " tokens after ",
                 total, " of the requests before it, more than max_num_tokens=",
                 sizes.max_num_tokens,
                 ". Split the prompt into chunks, or use a larger planner."));
    }
    total += counts[i];
  }
  return Status();
}

StepBuffer* Planner::FindFree(int32_t* index) {
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (buffers_[i] == nullptr) {
      buffers_[i] = std::make_unique<StepBuffer>(options_.sizes, *pool_);
    }
    if (!IsFree(static_cast<int64_t>(i))) continue;
    *index = static_cast<int32_t>(i);
    return buffers_[i].get();
  }
  return nullptr;
}

Result<StepBuffer*> Planner::Prepare(std::span<const SequenceHandle> handles,
                                     std::span<const int32_t> counts,
                                     Planned& planned) {
  if (handles.size() != counts.size()) {
    return InvalidArgument(StrCat("handles and counts differ in length: ",
                                  handles.size(), " and ", counts.size(), "."));
  }
  int32_t least = 1;
  for (int32_t count : counts) {
    planned.num_tokens += count;
    least = std::min(least, count);
  }
  if (Status s = CheckCounts(counts, planned.num_tokens, least); !s.ok()) {
    return s;
  }
  planned.seq_bucket =
      BucketOf(options_.seq_buckets, static_cast<int64_t>(handles.size()));
  planned.token_bucket = BucketOf(options_.token_buckets, planned.num_tokens);
  StepBuffer* buffer = FindFree(&planned.buffer);
  if (buffer == nullptr) {
    return Unavailable(StrCat(
        "all ring=", options_.ring,
        " buffers are leased by steps that are open or in flight. Commit or "
        "abort steps and retire them with an output of their computation, or "
        "use a larger ring."));
  }
  return buffer;
}

Result<Planned> Planner::Step(std::span<const SequenceHandle> handles,
                              std::span<const int32_t> counts) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return InUse();
  Planned planned;
  const Result<StepBuffer*> prepared = Prepare(handles, counts, planned);
  if (!prepared.ok()) return prepared.status();
  StepBuffer* const buffer = prepared.value();
  order_.Assign(handles, counts,
                planned.num_tokens == static_cast<int64_t>(counts.size()));
  SetRows(handles, counts, *buffer);
  next_delta_.indices.clear();
  next_delta_.pages.clear();
  buffer->Begin(order_.decode_end());
  if (!order_.repeated() || !RepeatDecodes(*buffer)) {
    if (Status status = PlaceRows(*buffer); !status.ok()) return status;
  }
  buffer->Finish(order_.prefill_end());
  order_.Accept(handles);
  std::swap(delta_, next_delta_);
  return planned;
}

Status Planner::Check(std::span<const SequenceHandle> handles,
                      std::span<const int32_t> counts) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return InUse();
  Planned planned;
  if (Status s = Prepare(handles, counts, planned).status(); !s.ok()) return s;
  PoolStep step;
  step.handles.assign(handles.begin(), handles.end());
  step.counts.assign(counts.begin(), counts.end());
  std::vector<int32_t> order(handles.size());
  std::iota(order.begin(), order.end(), 0);
  return pool_->CheckStep(order, options_.sizes.pages_per_seq, step);
}

void Planner::SetRows(std::span<const SequenceHandle> handles,
                      std::span<const int32_t> counts, StepBuffer& buffer) {
  if (buffer.order_version == order_.version()) return;
  buffer.order_version = order_.version();
  buffer.order.assign(order_.order().begin(), order_.order().end());
  buffer.step.handles.resize(handles.size());
  buffer.step.counts.resize(handles.size());
  for (size_t row = 0; row < handles.size(); ++row) {
    buffer.step.handles[row] = handles[buffer.order[row]];
    buffer.step.counts[row] = counts[buffer.order[row]];
  }
}

Status Planner::PlaceRows(StepBuffer& buffer) {
  const Status status = pool_->BeginStep(
      buffer.order, options_.sizes.pages_per_seq, buffer.step,
      [&](size_t row, const PagePool::Placed& seq) {
        buffer.PrefetchPages(row, seq);
      },
      [&](size_t row, const PagePool::Placed& seq) {
        buffer.WriteRow(row, seq);
        if (options_.track_delta) AddDelta(row, seq);
        layouts_[row] = seq.sequence.layout;
        lengths_[row] = seq.length();
      });
  if (!status.ok()) return status;
  for (const auto& other : buffers_) {
    if (other != nullptr) other->MarkAllStale();
  }
  buffer.ClearStale();
  return Status();
}

bool Planner::RepeatDecodes(StepBuffer& buffer) {
  PoolStep& step = buffer.step;
  const size_t rows = step.handles.size();
  const auto sync_tables = [&](auto placed) {
    for (const auto& other : buffers_) {
      if (other != nullptr) other->MarkStale(step.changed);
    }
    const auto sync = [&](size_t row) {
      buffer.SyncRow(row, placed(row));
      if (options_.track_delta) AddDelta(row, placed(row));
    };
    if (buffer.all_stale()) {
      for (size_t row = 0; row < rows; ++row) sync(row);
    } else {
      const std::span<const int32_t> stale = buffer.stale_rows();
      for (size_t i = 0; i < stale.size(); ++i) {
        if (i + 8 < stale.size()) buffer.PrefetchRow(stale[i + 8]);
        sync(stale[i]);
      }
    }
    buffer.ClearStale();
  };
  if (!pool_->RepeatStep({layouts_.data(), lengths_.data()},
                         options_.sizes.pages_per_seq, step,
                         buffer.field(Field::kSlotMapping), sync_tables)) {
    return false;
  }
  std::copy_n(step.lengths, rows, lengths_.data());
  buffer.WriteDecodes();
  return true;
}

void Planner::AddDelta(size_t row, const PagePool::Placed& seq) {
  const int64_t base = static_cast<int64_t>(row) * options_.sizes.pages_per_seq;
  const int64_t groups = pool_->num_groups();
  const auto add = [&](int32_t from, int32_t to) {
    for (int32_t slot = from; slot < to; ++slot) {
      next_delta_.indices.push_back(static_cast<int32_t>(base + slot));
      next_delta_.pages.push_back(std::max(seq.pages()[slot * groups], 0));
    }
  };
  // Dead slots may hold anything: nothing is sent for them.
  const auto ignore = [](int32_t, int32_t) {};
  const int32_t slots =
      static_cast<int32_t>(pool_->geometry().SlotsFor(seq.length()));
  if (!mirror_[row].Holds(seq, slots)) {
    mirror_[row].Sync(seq, slots, add, ignore, ignore);
  }
}

Status Planner::Commit(int64_t buffer, std::span<const int32_t> accepted) {
  PoolStep& step = buffers_[buffer]->step;
  if (!step.open) {
    return InvalidArgument(
        "the step is closed: a step commits or aborts once.");
  }
  if (!accepted.empty() && accepted.size() != step.handles.size()) {
    return InvalidArgument(StrCat("accepted has ", accepted.size(),
                                  " entries; the step has ",
                                  step.handles.size(), " rows."));
  }
  return pool_->CommitStep(step, accepted);
}

Status Planner::Abort(int64_t buffer) {
  PoolStep& step = buffers_[buffer]->step;
  if (!step.open) {
    return InvalidArgument(
        "the step is closed: a step commits or aborts once.");
  }
  return pool_->AbortStep(step);
}

Status Planner::Retire(int64_t buffer) {
  PoolStep& step = buffers_[buffer]->step;
  if (!step.in_flight) {
    return InvalidArgument("the step was retired already.");
  }
  return pool_->RetireStep(step);
}

}  // namespace pagemill
