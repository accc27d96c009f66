#include "csrc/core/page_pool.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <vector>

namespace pagemill {
namespace {

std::unique_ptr<PagePool> MakePool(int64_t pages, int64_t page_size) {
  return PagePool::Create(pages, page_size).value();
}

Status Append(PagePool& pool, SequenceHandle handle, int64_t count,
              int64_t max_pages = 1000) {
  return pool.Append(std::span(&handle, 1), std::span(&count, 1), max_pages,
                     [](size_t, const PagePool::Appended&) {});
}

TEST(PagePoolTest, RefusesBadSizes) {
  EXPECT_FALSE(PagePool::Create(0, 16).ok());
  EXPECT_FALSE(PagePool::Create(16, 0).ok());
  EXPECT_FALSE(PagePool::Create(int64_t{1} << 32, 1).ok());
  EXPECT_FALSE(PagePool::Create(1 << 20, 1 << 12).ok());
}

TEST(PagePoolTest, HandsPagesOutInOrder) {
  auto pool = MakePool(4, 2);
  const SequenceHandle seq = pool->Open();
  ASSERT_TRUE(Append(*pool, seq, 5).ok());
  EXPECT_EQ(pool->Pages(seq).value(), (std::vector<int32_t>{0, 1, 2}));
}

TEST(PagePoolTest, HandlesOfClosedSequencesAreRefused) {
  auto pool = MakePool(4, 2);
  const SequenceHandle first = pool->Open();
  ASSERT_TRUE(pool->Close(first).ok());
  const SequenceHandle second = pool->Open();
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
  const SequenceHandle a = pool->Open();
  ASSERT_TRUE(Append(*pool, a, 6).ok());
  const SequenceHandle b = pool->Fork(a).value();
  const SequenceHandle c = pool->Fork(b).value();  // b's page is not copied yet
  const std::vector<PageCopy> copies = pool->TakePageCopies();
  ASSERT_EQ(copies.size(), 2u);
  const int32_t written = pool->Pages(a).value().back();
  EXPECT_EQ(copies[0].source, written);
  EXPECT_EQ(copies[1].source, written);
  EXPECT_EQ(copies[1].target, pool->Pages(c).value().back());
  EXPECT_TRUE(pool->Audit().ok());
}

TEST(PagePoolTest, SourceOfAPendingCopyOutlivesItsSequence) {
  auto pool = MakePool(2, 4);
  const SequenceHandle a = pool->Open();
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
  const SequenceHandle a = pool->Open();
  ASSERT_TRUE(Append(*pool, a, 2).ok());
  ASSERT_TRUE(pool->Close(pool->Fork(a).value()).ok());
  EXPECT_TRUE(pool->TakePageCopies().empty());
  EXPECT_EQ(pool->num_free_pages(), 3);
}

TEST(PagePoolTest, TruncateNeedsAPageOnlyWhereItFreesNone) {
  auto pool = MakePool(3, 4);
  const SequenceHandle a = pool->Open();
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
  const SequenceHandle handles[] = {pool->Open(), pool->Open()};
  const int64_t counts[] = {8, 8};
  const Status status = pool->Append(
      handles, counts, 10, [](size_t, const PagePool::Appended&) { FAIL(); });
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(status.shortage().need, 4);
  EXPECT_EQ(status.shortage().free, 3);
  EXPECT_EQ(pool->Length(handles[0]).value(), 0);
  EXPECT_EQ(pool->num_free_pages(), 3);
}

// Against lists of (page owner, tokens): random operations, contents followed
// through copies, so that a lost or shared write would show.
class Model {
 public:
  explicit Model(int64_t page_size) : page_size_(page_size) {}

  std::map<SequenceHandle, std::vector<int>> tokens;  // what each must hold
  std::map<int32_t, std::vector<int>> memory;         // what each page holds

  void Write(PagePool& pool, SequenceHandle seq, int64_t count, int value) {
    const std::vector<int32_t> pages = pool.Pages(seq).value();
    std::vector<int>& mine = tokens[seq];
    for (int64_t i = 0; i < count; ++i) {
      const int64_t position = static_cast<int64_t>(mine.size());
      std::vector<int>& page = memory[pages[position / page_size_]];
      page.resize(page_size_, -1);
      page[position % page_size_] = value;
      mine.push_back(value);
    }
  }
  void Copy(const std::vector<PageCopy>& copies) {
    for (const PageCopy& copy : copies)
      memory[copy.target] = memory[copy.source];
  }
  void Check(PagePool& pool) {
    std::set<int32_t> used;
    for (const auto& [seq, expected] : tokens) {
      ASSERT_EQ(pool.Length(seq).value(),
                static_cast<int64_t>(expected.size()));
      const std::vector<int32_t> pages = pool.Pages(seq).value();
      used.insert(pages.begin(), pages.end());
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_EQ(memory[pages[i / page_size_]][i % page_size_], expected[i]);
      }
    }
    ASSERT_EQ(pool.num_free_pages(),
              pool.total_num_pages() - static_cast<int64_t>(used.size()));
    const Status audit = pool.Audit();
    ASSERT_TRUE(audit.ok()) << audit.message();
  }

 private:
  const int64_t page_size_;
};

TEST(PagePoolTest, EqualsAModel) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    std::mt19937 rng(seed);
    const int64_t page_size = 1 + seed % 5;
    auto pool = MakePool(12, page_size);
    Model model(page_size);
    for (int step = 0; step < 300; ++step) {
      const auto pick = [&] {
        auto it = model.tokens.begin();
        std::advance(it, rng() % model.tokens.size());
        return it->first;
      };
      const unsigned what = model.tokens.empty() ? 0 : rng() % 6;
      if (what == 0 && model.tokens.size() < 6) {
        model.tokens[pool->Open()];
      } else if (what == 1) {
        const SequenceHandle seq = pick();
        ASSERT_TRUE(pool->Close(seq).ok());
        model.tokens.erase(seq);
      } else if (what == 2 && model.tokens.size() < 6) {
        const SequenceHandle seq = pick();
        const Result<SequenceHandle> fork = pool->Fork(seq);
        if (fork.ok()) model.tokens[fork.value()] = model.tokens[seq];
      } else if (what == 3) {
        const SequenceHandle seq = pick();
        const int64_t length = rng() % (model.tokens[seq].size() + 1);
        if (pool->Truncate(seq, length).ok()) model.tokens[seq].resize(length);
      } else if (!model.tokens.empty()) {
        const SequenceHandle seq = pick();
        const int64_t count = 1 + rng() % 7;
        if (rng() % 2 == 0) model.Copy(pool->TakePageCopies());
        if (Append(*pool, seq, count).ok()) {
          model.Write(*pool, seq, count, step);
        }
      }
      if (rng() % 4 == 0) {
        model.Copy(pool->TakePageCopies());
        model.Check(*pool);
      }
      ASSERT_TRUE(pool->Audit().ok()) << pool->Audit().message();
    }
    for (const auto& [seq, tokens] : model.tokens) {
      EXPECT_TRUE(pool->Close(seq).ok());
    }
    pool->TakePageCopies();
    EXPECT_EQ(pool->num_free_pages(), 12);
  }
}

TEST(PagePoolTest, IsSafeFromSeveralThreads) {
  auto pool = MakePool(64, 4);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&pool] {
      for (int i = 0; i < 300; ++i) {
        const SequenceHandle seq = pool->Open();
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

}  // namespace
}  // namespace pagemill
