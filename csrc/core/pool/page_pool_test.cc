#include "csrc/core/pool/page_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <thread>
#include <utility>
#include <vector>

namespace pagemill {
namespace {

std::unique_ptr<PagePool> MakePool(int64_t pages, int64_t page_size) {
  return PagePool::Create({.total_num_pages = pages, .page_size = page_size})
      .value();
}

// A step by itself, as a planner would hold it.
struct Step {
  Step() = default;
  Step(SequenceHandle handle, int32_t count) { Add(handle, count); }

  void Add(SequenceHandle handle, int32_t count) {
    step.handles.push_back(handle);
    step.counts.push_back(count);
  }
  Status Begin(PagePool& pool, int64_t max_pages = 1000) {
    lengths.resize(step.handles.size());
    step.lengths = lengths.data();
    std::vector<int32_t> order(step.handles.size());
    std::iota(order.begin(), order.end(), 0);
    return pool.BeginStep(
        order, max_pages, step, [](size_t, auto) {},
        [](size_t, const PagePool::Placed&) {});
  }

  PoolStep step;
  std::vector<int32_t> lengths;
};

Status Append(PagePool& pool, SequenceHandle handle, int32_t count,
              int64_t max_pages = 1000) {
  Step step(handle, count);
  if (Status status = step.Begin(pool, max_pages); !status.ok()) return status;
  if (Status status = pool.CommitStep(step.step, {}); !status.ok()) {
    return status;
  }
  return pool.RetireStep(step.step);
}

SequenceHandle Open(PagePool& pool) { return pool.Open({}, {}).handle; }

std::vector<int32_t> Pages0(const PagePool& pool, SequenceHandle handle) {
  return pool.PagesOf(handle, 0).value();
}

TEST(PagePoolTest, RefusesBadSizes) {
  const auto made = [](int64_t pages, int64_t page_size,
                       std::vector<int64_t> windows = {0}) {
    return PagePool::Create({.total_num_pages = pages,
                             .page_size = page_size,
                             .sliding_windows = std::move(windows)})
        .ok();
  };
  EXPECT_TRUE(made(16, 16));
  EXPECT_FALSE(made(0, 16));
  EXPECT_FALSE(made(16, 0));
  EXPECT_FALSE(made(int64_t{1} << 32, 1));
  EXPECT_FALSE(made(1 << 20, 1 << 12));
  EXPECT_FALSE(made(16, 16, {}));
  EXPECT_FALSE(made(16, 16, {0, -1}));
}

TEST(PagePoolTest, HandsPagesOutInOrder) {
  auto pool = MakePool(4, 2);
  const SequenceHandle seq = Open(*pool);
  ASSERT_TRUE(Append(*pool, seq, 5).ok());
  EXPECT_EQ(Pages0(*pool, seq), (std::vector<int32_t>{0, 1, 2}));
}

TEST(PagePoolTest, HandlesOfClosedSequencesAreRefused) {
  auto pool = MakePool(4, 2);
  const SequenceHandle first = Open(*pool);
  ASSERT_TRUE(pool->Close(first).ok());
  const SequenceHandle second = Open(*pool);
  EXPECT_NE(first, second);
  EXPECT_EQ(pool->Close(first).code(), StatusCode::kInvalidArgument);
  EXPECT_FALSE(pool->Length(first).ok());
  EXPECT_FALSE(pool->Fork(first).ok());
  EXPECT_FALSE(Append(*pool, first, 1).ok());
  for (const SequenceHandle foreign :
       {int64_t{-1}, int64_t{77}, second + (int64_t{1} << 32)}) {
    EXPECT_FALSE(pool->Length(foreign).ok());
  }
  EXPECT_TRUE(pool->Length(second).ok());
}

TEST(PagePoolTest, ForkOfAForkCopiesFromTheWrittenPage) {
  auto pool = MakePool(8, 4);
  const SequenceHandle a = Open(*pool);
  ASSERT_TRUE(Append(*pool, a, 6).ok());
  const SequenceHandle b = pool->Fork(a).value();
  const SequenceHandle c = pool->Fork(b).value();  // b's page is not copied yet
  const std::vector<PageCopy> copies = pool->TakePageCopies();
  ASSERT_EQ(copies.size(), 2u);
  const int32_t written = Pages0(*pool, a).back();
  EXPECT_EQ(copies[0].source, written);
  EXPECT_EQ(copies[1].source, written);
  EXPECT_EQ(copies[1].target, Pages0(*pool, c).back());
  EXPECT_TRUE(pool->Audit().ok());
}

TEST(PagePoolTest, SourceOfAPendingCopyOutlivesItsSequence) {
  auto pool = MakePool(2, 4);
  const SequenceHandle a = Open(*pool);
  ASSERT_TRUE(Append(*pool, a, 2).ok());
  const SequenceHandle b = pool->Fork(a).value();
  ASSERT_TRUE(pool->Close(a).ok());
  EXPECT_EQ(pool->num_free_pages(), 0);
  pool->TakePageCopies();
  EXPECT_EQ(pool->num_free_pages(), 1);
  EXPECT_TRUE(pool->Close(b).ok());
  EXPECT_TRUE(pool->Audit().ok());
}

TEST(PagePoolTest, ClosingDropsAPendingCopy) {
  auto pool = MakePool(4, 4);
  const SequenceHandle a = Open(*pool);
  ASSERT_TRUE(Append(*pool, a, 2).ok());
  ASSERT_TRUE(pool->Close(pool->Fork(a).value()).ok());
  EXPECT_TRUE(pool->TakePageCopies().empty());
  EXPECT_EQ(pool->num_free_pages(), 3);
}

TEST(PagePoolTest, TruncateNeedsAPageOnlyWhereItFreesNone) {
  auto pool = MakePool(3, 4);
  const SequenceHandle a = Open(*pool);
  ASSERT_TRUE(Append(*pool, a, 8).ok());
  const SequenceHandle b = pool->Fork(a).value();
  ASSERT_TRUE(Append(*pool, b, 1).ok());  // the last free page
  // Its own third page makes room for the copy of the second.
  ASSERT_TRUE(pool->Truncate(b, 6).ok());
  EXPECT_EQ(pool->TakePageCopies().size(), 1u);
  const Status short_of_pages = pool->Truncate(b, 2);
  EXPECT_TRUE(pool->Audit().ok());
  // Dropping the second page frees it, and the first may be copied into it.
  EXPECT_TRUE(short_of_pages.ok());
  EXPECT_EQ(pool->Truncate(a, 9).code(), StatusCode::kInvalidArgument);
}

TEST(PagePoolTest, AppendIsAllOrNothing) {
  auto pool = MakePool(3, 4);
  Step step;
  step.Add(Open(*pool), 8);
  step.Add(Open(*pool), 8);
  const Status status = step.Begin(*pool);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(status.shortage().need, 4);
  EXPECT_EQ(status.shortage().free, 3);
  EXPECT_EQ(pool->Length(step.step.handles[0]).value(), 0);
  EXPECT_EQ(pool->num_free_pages(), 3);
}

TEST(PagePoolTest, OpenFindsWhatWasCommitted) {
  auto pool = MakePool(8, 4);
  const std::vector<int32_t> prompt = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  const SequenceHandle a = pool->Open(prompt, {}).handle;
  Step step(a, 9);
  ASSERT_TRUE(step.Begin(*pool).ok());
  EXPECT_EQ(pool->Probe(prompt, {}), 0);  // not written for certain yet
  ASSERT_TRUE(pool->CommitStep(step.step, {}).ok());
  ASSERT_TRUE(pool->RetireStep(step.step).ok());
  EXPECT_EQ(pool->Probe(prompt, {}), 8);
  const uint8_t salt[] = {1};
  EXPECT_EQ(pool->Probe(prompt, salt), 0);
  // One token at least is left to compute.
  EXPECT_EQ(pool->Probe(std::span(prompt).first(8), {}), 4);
  EXPECT_EQ(pool->Probe(std::span(prompt).first(4), {}), 0);
  const PagePool::Opened b = pool->Open(prompt, {});
  EXPECT_EQ(b.num_cached_tokens, 8);
  EXPECT_EQ(pool->PagesOf(b.handle, 0).value(), (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(pool->ReferenceCount(0).value(), 2);
  EXPECT_TRUE(pool->Audit().ok());
}

TEST(PagePoolTest, AbortedPagesAreNeverFound) {
  auto pool = MakePool(8, 4);
  const std::vector<int32_t> prompt = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  const SequenceHandle a = pool->Open(prompt, {}).handle;
  Step step(a, 9);
  ASSERT_TRUE(step.Begin(*pool).ok());
  ASSERT_TRUE(pool->AbortStep(step.step).ok());
  EXPECT_EQ(pool->Length(a).value(), 0);
  EXPECT_EQ(pool->Probe(prompt, {}), 0);
  EXPECT_EQ(pool->StateOf(0).value(), PageState::kFenced);
  ASSERT_TRUE(pool->RetireStep(step.step).ok());
  EXPECT_EQ(pool->num_free_pages(), 8);
}

TEST(PagePoolTest, TakesRejectedTokensBack) {
  auto pool = MakePool(8, 4);
  const SequenceHandle a = pool->Open({}, {}).handle;
  ASSERT_TRUE(Append(*pool, a, 3).ok());
  Step step(a, 6);  // a token and five drafts
  ASSERT_TRUE(step.Begin(*pool).ok());
  const int32_t too_many[] = {7}, kept[] = {2};
  EXPECT_FALSE(pool->CommitStep(step.step, too_many).ok());
  ASSERT_TRUE(pool->CommitStep(step.step, kept).ok());
  EXPECT_EQ(pool->Length(a).value(), 5);
  EXPECT_EQ(pool->CommittedLength(a).value(), 5);
  EXPECT_EQ(pool->PagesOf(a, 0).value().size(), 2u);
  ASSERT_TRUE(pool->RetireStep(step.step).ok());
  EXPECT_TRUE(pool->Audit().ok());
}

TEST(PagePoolTest, StepsOnTopOfEachOther) {
  auto pool = MakePool(8, 4);
  const SequenceHandle a = pool->Open({}, {}).handle;
  Step first(a, 3), second(a, 3);
  ASSERT_TRUE(first.Begin(*pool).ok());
  ASSERT_TRUE(second.Begin(*pool).ok());
  EXPECT_EQ(pool->CommittedLength(a).value(), 0);
  EXPECT_FALSE(pool->AbortStep(first.step).ok());  // the second stands on it
  const int32_t kept[] = {1};
  EXPECT_FALSE(pool->CommitStep(first.step, kept).ok());
  ASSERT_TRUE(pool->CommitStep(first.step, {}).ok());
  EXPECT_EQ(pool->CommittedLength(a).value(), 3);
  ASSERT_TRUE(pool->AbortStep(second.step).ok());
  EXPECT_EQ(pool->Length(a).value(), 3);
  EXPECT_EQ(pool->CommittedLength(a).value(), 3);
}

TEST(PagePoolTest, WindowsGiveBackWhatTheyPassed) {
  auto pool = std::move(PagePool::Create({.total_num_pages = 64,
                                          .page_size = 4,
                                          .sliding_windows = {0, 6}}))
                  .value();
  const SequenceHandle a = pool->Open({}, {}).handle;
  ASSERT_TRUE(Append(*pool, a, 22).ok());
  // The next query, at 22, sees 17 to 22: slots 0 to 3 have passed.
  EXPECT_EQ(pool->PagesOf(a, 1).value(),
            (std::vector<int32_t>{-1, -1, -1, -1, 9, 11}));
  EXPECT_EQ(pool->PagesOf(a, 0).value().size(), 6u);
  EXPECT_EQ(pool->num_free_pages(), 64 - 8);
  EXPECT_FALSE(pool->Truncate(a, 15).ok());  // would see what is gone
  EXPECT_TRUE(pool->Truncate(a, 21).ok());
  EXPECT_TRUE(pool->Truncate(a, 0).ok());
  EXPECT_EQ(pool->num_free_pages(), 64);
}

TEST(PagePoolTest, SwapsOutAndInAgain) {
  auto pool = MakePool(4, 4);
  const SequenceHandle a = pool->Open({}, {}).handle;
  ASSERT_TRUE(Append(*pool, a, 10).ok());
  EXPECT_EQ(pool->BeginSwapOut(a).value().size(), 3u);
  EXPECT_FALSE(Append(*pool, a, 1).ok());
  ASSERT_TRUE(pool->EndSwapOut(a).ok());
  EXPECT_EQ(pool->num_free_pages(), 4);
  EXPECT_EQ(pool->Length(a).value(), 10);
  const SequenceHandle b = pool->Open({}, {}).handle;
  ASSERT_TRUE(Append(*pool, b, 5).ok());
  EXPECT_EQ(pool->SwapIn(a).status().shortage().need, 3);
  ASSERT_TRUE(pool->Close(b).ok());
  EXPECT_EQ(pool->SwapIn(a).value().size(), 3u);
  EXPECT_TRUE(Append(*pool, a, 1).ok());
  EXPECT_TRUE(pool->Audit().ok());
}

// What every page holds is followed through writes and copies, so that a lost,
// shared or early found write would show.
class Model {
 public:
  Model(PagePool& pool, unsigned seed) : pool_(pool), random_(seed) {}

  void Run(int calls) {
    for (int i = 0; i < calls; ++i) {
      Call();
      const Status audit = pool_.Audit();
      ASSERT_TRUE(audit.ok()) << audit.message();
      if (Random(4) == 0) Check();
      if (testing::Test::HasFatalFailure()) return;
    }
    while (!steps_.empty()) End(steps_.size() - 1);
    for (const Live& seq : live_) ASSERT_TRUE(pool_.Close(seq.handle).ok());
    pool_.TakePageCopies();
    ASSERT_EQ(pool_.num_available_pages(), pool_.total_num_pages());
  }

 private:
  struct Live {
    SequenceHandle handle;
    std::vector<int32_t> tokens;  // what it must hold
    std::vector<int32_t> prompt;
    bool swapped = false;
  };

  uint32_t Random(uint32_t below) { return random_() % below; }

  void Call() {
    const uint32_t what = live_.empty() ? 0 : Random(16);
    if (what < 2) return OpenOne();
    Live& seq = live_[Random(static_cast<uint32_t>(live_.size()))];
    if (what == 2) {
      ASSERT_TRUE(pool_.Close(seq.handle).ok());
      std::swap(seq, live_.back());
      live_.pop_back();
    } else if (what == 3 && live_.size() < 6) {
      Copy();
      const Result<SequenceHandle> fork = pool_.Fork(seq.handle);
      Live copy = seq;
      if (!fork.ok()) return;
      copy.handle = fork.value();
      live_.push_back(copy);
    } else if (what == 4) {
      const size_t length =
          Random(static_cast<uint32_t>(seq.tokens.size()) + 1);
      if (!pool_.Truncate(seq.handle, static_cast<int64_t>(length)).ok()) {
        return;
      }
      if (length < seq.tokens.size()) {
        seq.prompt.resize(std::min(seq.prompt.size(), length));
      }
      seq.tokens.resize(length);
    } else if (what == 5 && !seq.swapped) {
      if (!pool_.Preempt(seq.handle).ok()) return;
      seq.tokens.clear();
      Resume(seq);
    } else if (what == 6) {
      Swap(seq);
    } else if (what == 7 && !steps_.empty()) {
      End(Random(static_cast<uint32_t>(steps_.size())));
    } else if (steps_.size() < 3) {
      Begin();
    }
  }

  void OpenOne() {
    if (live_.size() >= 6) return;
    Live seq;
    // Few different tokens: prefixes often repeat.
    for (uint32_t i = Random(14); i > 0; --i) {
      seq.prompt.push_back(static_cast<int32_t>(Random(2)));
    }
    const PagePool::Opened opened = pool_.Open(seq.prompt, {});
    seq.handle = opened.handle;
    seq.tokens.assign(seq.prompt.begin(),
                      seq.prompt.begin() + opened.num_cached_tokens);
    live_.push_back(seq);
  }

  void Resume(Live& seq) {
    const int64_t length = pool_.Resume(seq.handle).value();
    ASSERT_LE(length, static_cast<int64_t>(seq.prompt.size()));
    seq.tokens.assign(seq.prompt.begin(), seq.prompt.begin() + length);
  }

  void Swap(Live& seq) {
    if (!seq.swapped) {
      const Result<std::vector<int32_t>> out = pool_.BeginSwapOut(seq.handle);
      if (!out.ok()) return;
      ASSERT_TRUE(pool_.EndSwapOut(seq.handle).ok());
      seq.swapped = true;
      return;
    }
    const Result<std::vector<int32_t>> in = pool_.SwapIn(seq.handle);
    if (!in.ok()) return;
    seq.swapped = false;
    const int64_t groups = pool_.num_groups();
    for (size_t i = 0; i < in.value().size(); ++i) {
      const int32_t page = in.value()[i];
      if (page < 0) continue;
      for (int64_t j = 0; j < pool_.page_size(); ++j) {
        const size_t at = i / groups * pool_.page_size() + j;
        if (at < seq.tokens.size()) Cell(page, j) = seq.tokens[at];
      }
    }
  }

  void Begin() {
    Copy();
    std::unique_ptr<Step> step;
    for (Live& seq : live_) {
      if (Random(2) == 0) continue;
      const int32_t count = 1 + static_cast<int32_t>(Random(6));
      if (step == nullptr) step = std::make_unique<Step>();
      step->Add(seq.handle, count);
    }
    if (step == nullptr || !step->Begin(pool_).ok()) return;
    for (size_t row = 0; row < step->step.handles.size(); ++row) {
      for (Live& seq : live_) {
        if (seq.handle == step->step.handles[row]) {
          Write(seq, step->step.counts[row]);
        }
      }
    }
    steps_.push_back(std::move(step));
  }

  void Write(Live& seq, int32_t count) {
    for (; count > 0; --count) {
      const int64_t at = static_cast<int64_t>(seq.tokens.size());
      // Past the prompt come tokens whose ids the pool is not told.
      const int32_t token = at < static_cast<int64_t>(seq.prompt.size())
                                ? seq.prompt[at]
                                : static_cast<int32_t>(100 + Random(1000));
      seq.tokens.push_back(token);
      for (int64_t group = 0; group < pool_.num_groups(); ++group) {
        const int32_t page =
            pool_.PagesOf(seq.handle, group).value()[at / pool_.page_size()];
        Cell(page, at % pool_.page_size()) = token;
      }
    }
  }

  // Commits, accepting in part at times, or aborts; then retires.
  void End(size_t index) {
    PoolStep& step = steps_[index]->step;
    std::vector<int32_t> accepted;
    const uint32_t how = Random(4);
    if (how == 0) {
      for (int32_t count : step.counts) {
        accepted.push_back(static_cast<int32_t>(Random(count + 1)));
      }
    }
    const bool abort = how == 1 && pool_.AbortStep(step).ok();
    if (!abort) {
      if (!pool_.CommitStep(step, accepted).ok()) {
        accepted.clear();
        ASSERT_TRUE(pool_.CommitStep(step, {}).ok());
      }
    }
    ASSERT_TRUE(pool_.RetireStep(step).ok());
    for (Live& seq : live_) {
      const size_t length = pool_.Length(seq.handle).value();
      if (length == seq.tokens.size()) continue;
      ASSERT_LT(length, seq.tokens.size());
      seq.tokens.resize(length);
      // What was rejected may not be what the prompt says either.
      if (!abort) seq.prompt.resize(std::min(seq.prompt.size(), length));
    }
    steps_.erase(steps_.begin() + static_cast<std::ptrdiff_t>(index));
  }

  void Copy() {
    for (const PageCopy& copy : pool_.TakePageCopies()) {
      memory_[copy.target] = memory_[copy.source];
    }
  }

  void Check() {
    Copy();
    for (const Live& seq : live_) {
      const int64_t length = pool_.Length(seq.handle).value();
      ASSERT_EQ(length, static_cast<int64_t>(seq.tokens.size()));
      if (seq.swapped) continue;
      for (int64_t group = 0; group < pool_.num_groups(); ++group) {
        const std::vector<int32_t> pages =
            pool_.PagesOf(seq.handle, group).value();
        for (int64_t i = pool_.PassedSlots(group, length) * pool_.page_size();
             i < length; ++i) {
          const int32_t page = pages[i / pool_.page_size()];
          ASSERT_GE(page, 0);
          ASSERT_EQ(Cell(page, i % pool_.page_size()), seq.tokens[i]);
        }
      }
    }
  }

  int32_t& Cell(int32_t page, int64_t offset) {
    std::vector<int32_t>& cells = memory_[page];
    cells.resize(pool_.page_size(), -1);
    return cells[offset];
  }

  PagePool& pool_;
  std::mt19937 random_;
  std::vector<Live> live_;
  std::vector<std::unique_ptr<Step>> steps_;
  std::map<int32_t, std::vector<int32_t>> memory_;
};

TEST(PagePoolTest, EqualsAModel) {
  for (unsigned seed = 0; seed < 120; ++seed) {
    PagePoolOptions options{.total_num_pages = 16 + seed % 20,
                            .page_size = 1 + seed % 5};
    if (seed % 3 == 1) options.sliding_windows = {0, 3};
    if (seed % 3 == 2) options.sliding_windows = {5};
    options.prefix_cache = seed % 7 != 0;
    auto pool = PagePool::Create(options).value().release();
    const std::unique_ptr<PagePool> owner(pool);
    Model(*pool, seed).Run(400);
    if (testing::Test::HasFatalFailure()) {
      FAIL() << "seed " << seed;
    }
  }
}

TEST(PagePoolTest, IsSafeFromSeveralThreads) {
  auto pool = MakePool(64, 4);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&pool] {
      for (int i = 0; i < 300; ++i) {
        const SequenceHandle seq = Open(*pool);
        if (Append(*pool, seq, 1 + i % 9).ok()) {
          const Result<SequenceHandle> fork = pool->Fork(seq);
          if (fork.ok()) {
            EXPECT_TRUE(pool->Close(fork.value()).ok());
          }
        }
        EXPECT_TRUE(pool->Close(seq).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool->num_free_pages(), 64);
  EXPECT_EQ(pool->num_sequences(), 0);
  EXPECT_TRUE(pool->Audit().ok());
}

TEST(PagePoolTest, TokensToldWhileSwappedOutPublishNoPage) {
  auto pool = MakePool(4, 4);
  const std::vector<int32_t> tokens = {1, 2, 3, 4, 5};
  const SequenceHandle a = Open(*pool);
  ASSERT_TRUE(Append(*pool, a, 4).ok());
  ASSERT_TRUE(pool->BeginSwapOut(a).ok());
  ASSERT_TRUE(pool->EndSwapOut(a).ok());
  const SequenceHandle b = Open(*pool);
  ASSERT_TRUE(Append(*pool, b, 4).ok());  // in the page that was a's
  ASSERT_TRUE(pool->Extend(a, tokens).ok());
  EXPECT_EQ(pool->Probe(tokens, {}), 0);
}

TEST(PagePoolTest, StepsCommittedOutOfOrderShowNoTokenEarly) {
  auto pool = MakePool(8, 4);
  const SequenceHandle a = Open(*pool), b = Open(*pool);
  Step first(a, 4), other(b, 1), second(a, 2), third(a, 2);
  for (Step* step : {&first, &other, &second, &third}) {
    ASSERT_TRUE(step->Begin(*pool).ok());
  }
  for (Step* step : {&second, &third, &other}) {
    ASSERT_TRUE(pool->CommitStep(step->step, {}).ok());
    EXPECT_EQ(pool->CommittedLength(a).value(), 0);
  }
  ASSERT_TRUE(pool->CommitStep(first.step, {}).ok());
  EXPECT_EQ(pool->CommittedLength(a).value(), 8);
}

TEST(PagePoolTest, WhatACommitTakesBackIsNoLaterStepsEither) {
  auto pool = MakePool(8, 3);
  const std::vector<int32_t> tokens = {1, 2, 3, 4};
  const SequenceHandle a = Open(*pool);
  Step first(a, 4), second(a, 4), third(a, 3);
  ASSERT_TRUE(first.Begin(*pool).ok());
  ASSERT_TRUE(second.Begin(*pool).ok());
  ASSERT_TRUE(pool->Truncate(a, 3).ok());
  ASSERT_TRUE(pool->CommitStep(first.step, std::vector<int32_t>{2}).ok());
  ASSERT_TRUE(third.Begin(*pool).ok());
  ASSERT_TRUE(pool->CommitStep(second.step, {}).ok());
  EXPECT_EQ(pool->CommittedLength(a).value(), 2);
  ASSERT_TRUE(pool->Extend(a, tokens).ok());
  EXPECT_EQ(pool->Probe(tokens, {}), 0);
}

TEST(PagePoolTest, ACopiedPageIsPublishedOnceFull) {
  auto pool = MakePool(8, 4);
  const std::vector<int32_t> tokens = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  const SequenceHandle a = pool->Open(tokens, {}).handle;
  ASSERT_TRUE(Append(*pool, a, 6).ok());
  const SequenceHandle b = pool->Fork(a).value();
  ASSERT_TRUE(pool->Truncate(b, 3).ok());  // the first page is a's too
  ASSERT_TRUE(pool->Extend(b, std::vector<int32_t>{7, 7, 7, 7, 7, 7}).ok());
  const SequenceHandle c = pool->Fork(a).value();
  pool->TakePageCopies();
  EXPECT_EQ(pool->Stats().pages[static_cast<size_t>(PageState::kReserved)], 0);
  ASSERT_TRUE(Append(*pool, b, 1).ok());
  ASSERT_TRUE(Append(*pool, c, 2).ok());
  EXPECT_EQ(pool->Probe(std::vector<int32_t>{1, 2, 3, 7, 0}, {}), 4);
  EXPECT_EQ(pool->Probe(tokens, {}), 8);
}

TEST(PagePoolTest, WhatAForkTookOverIsNotTakenBack) {
  for (const bool close : {false, true}) {
    auto pool = MakePool(8, 4);
    const std::vector<int32_t> tokens = {1, 2, 3, 4, 5};
    const SequenceHandle a = pool->Open(tokens, {}).handle;
    Step step(a, 4);
    ASSERT_TRUE(step.Begin(*pool).ok());
    const SequenceHandle b = pool->Fork(a).value();
    ASSERT_TRUE((close ? pool->Close(a) : pool->Truncate(a, 0)).ok());
    EXPECT_EQ(pool->AbortStep(step.step).code(), StatusCode::kInvalidArgument);
    EXPECT_FALSE(pool->CommitStep(step.step, std::vector<int32_t>{3}).ok());
    EXPECT_EQ(pool->CommittedLength(b).value(), 0);
    ASSERT_TRUE(pool->CommitStep(step.step, {}).ok());
    EXPECT_EQ(pool->CommittedLength(b).value(), 4);
    EXPECT_EQ(pool->StateOf(Pages0(*pool, b)[0]).value(), PageState::kWritten);
    ASSERT_TRUE(Append(*pool, b, 1).ok());
    EXPECT_EQ(pool->Probe(tokens, {}), 4);
    ASSERT_TRUE(pool->Audit().ok());
  }
}

}  // namespace
}  // namespace pagemill
