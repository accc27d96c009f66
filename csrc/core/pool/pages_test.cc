#include "csrc/core/pool/pages.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string_view>
#include <vector>

namespace pagemill {
namespace {

PageKey Key(uint64_t i) { return {i + 1, (i + 1) * 0x9e3779b97f4a7c15u}; }

// Publishes a page under a key and lets it go.
int32_t Cache(Pages& pages, uint64_t key) {
  const int32_t page = pages.Take();
  pages.Commit(page);
  EXPECT_TRUE(pages.Publish(page, Key(key)));
  pages.Release(page);
  return page;
}

TEST(PagesTest, StatesOfALife) {
  Pages pages(2, true, 0);
  const int32_t page = pages.Take();
  EXPECT_EQ(pages.state(page), PageState::kReserved);
  EXPECT_TRUE(pages.IsPrivate(page));
  pages.Commit(page);
  EXPECT_EQ(pages.state(page), PageState::kWritten);
  ASSERT_TRUE(pages.Publish(page, Key(0)));
  EXPECT_EQ(pages.state(page), PageState::kPublished);
  EXPECT_FALSE(pages.IsPrivate(page));
  pages.Share(page);
  EXPECT_EQ(pages.references(page), 2);
  pages.Release(page);
  pages.Release(page);
  EXPECT_EQ(pages.state(page), PageState::kEvictable);
  EXPECT_EQ(pages.references(page), 0);
  EXPECT_EQ(pages.available(), 2);
  EXPECT_EQ(pages.Lookup(Key(0)), page);
  pages.Share(page);
  EXPECT_EQ(pages.state(page), PageState::kPublished);
  pages.MakePrivate(page);
  EXPECT_EQ(pages.state(page), PageState::kWritten);
  EXPECT_EQ(pages.Lookup(Key(0)), Pages::kNone);
  pages.Release(page);
  EXPECT_EQ(pages.state(page), PageState::kFree);
}

TEST(PagesTest, OneKeyOnePage) {
  Pages pages(2, true, 0);
  const int32_t first = Cache(pages, 7), second = pages.Take();
  EXPECT_FALSE(pages.Publish(second, Key(7)));
  EXPECT_EQ(pages.Lookup(Key(7)), first);
}

TEST(PagesTest, PagesBehindOneWithTheSameKey) {
  Pages pages(3, true, 0, /*duplicates=*/true);
  const int32_t a = pages.Take(), b = pages.Take(), c = pages.Take();
  for (const int32_t page : {a, b, c}) {
    pages.Commit(page);
    pages.PublishBehind(page, Key(7));
  }
  EXPECT_STREQ(pages.Audit({1, 1, 1}), "");
  for (const int32_t page : {a, b, c}) {
    EXPECT_EQ(pages.Lookup(Key(7)), page);
    pages.Forget(page);
    EXPECT_EQ(pages.state(page), PageState::kWritten);
  }
  EXPECT_EQ(pages.Lookup(Key(7)), Pages::kNone);
  EXPECT_EQ(pages.num_evictions(), 3);
}

// Whatever leaves the index's one chain, what is published next goes last.
TEST(PagesTest, PublishesLastAfterAnyIsForgotten) {
  for (int32_t gone = 0; gone < 3; ++gone) {
    Pages pages(4, true, 0, /*duplicates=*/true);
    for (int32_t page = 0; page < 3; ++page) {
      pages.Commit(pages.Take());
      pages.PublishBehind(page, Key(7));
    }
    pages.Forget(gone);
    pages.Commit(pages.Take());
    pages.PublishBehind(3, Key(7));
    for (int32_t page = 0; page < 4; ++page) {
      if (page == gone) continue;
      EXPECT_EQ(pages.Lookup(Key(7)), page);
      pages.Forget(page);
    }
    EXPECT_TRUE(pages.Publish(gone, Key(7)));
    pages.PublishBehind(0 == gone ? 1 : 0, Key(7));
    EXPECT_EQ(pages.Lookup(Key(7)), gone);
    EXPECT_STREQ(pages.Audit({1, 1, 1, 1}), "");
  }
}

TEST(PagesTest, ForgottenPagesAreTakenInTheirOrder) {
  Pages pages(3, true, 0);
  const int32_t a = Cache(pages, 0), b = Cache(pages, 1), c = Cache(pages, 2);
  pages.Forget(b);
  EXPECT_EQ(pages.Lookup(Key(1)), Pages::kNone);
  EXPECT_EQ(pages.Take(), a);
  EXPECT_EQ(pages.Take(), b);
  pages.ForgetEvictable();
  EXPECT_EQ(pages.state(c), PageState::kEvictable);
  EXPECT_EQ(pages.Lookup(Key(2)), Pages::kNone);
  pages.Share(c);
  EXPECT_EQ(pages.state(c), PageState::kWritten);
  EXPECT_STREQ(pages.Audit({1, 1, 1}), "");
}

TEST(PagesTest, EvictsWhatWasReleasedFirst) {
  Pages pages(3, true, 8);
  const int32_t a = Cache(pages, 0), b = Cache(pages, 1), c = Cache(pages, 2);
  pages.Share(a);
  pages.Release(a);  // now the newest
  EXPECT_EQ(pages.Take(), b);
  EXPECT_EQ(pages.Take(), c);
  EXPECT_EQ(pages.Take(), a);
  EXPECT_EQ(pages.available(), 0);
  EXPECT_EQ(pages.num_evictions(), 3);
  int64_t dropped = -1;
  const std::vector<PageEvent> events = pages.TakeEvents(&dropped);
  ASSERT_EQ(events.size(), 6u);
  EXPECT_EQ(events[3].kind, PageEvent::kEvicted);
  EXPECT_EQ(events[3].page, b);
  EXPECT_EQ(events[3].key, Key(1));
  EXPECT_EQ(dropped, 0);
}

TEST(PagesTest, EventsThatFindNoRoomAreCounted) {
  Pages pages(4, true, 1);
  for (uint64_t i = 0; i < 4; ++i) Cache(pages, i);
  int64_t dropped = 0;
  EXPECT_EQ(pages.TakeEvents(&dropped).size(), 1u);
  EXPECT_EQ(dropped, 3);
  EXPECT_TRUE(pages.TakeEvents(&dropped).empty());
  EXPECT_EQ(dropped, 0);
}

TEST(PagesTest, FencedUntilTheStepsBeforeItAreRetired) {
  Pages pages(2, true, 0);
  const int64_t first = pages.BeginStep(), second = pages.BeginStep();
  const int32_t page = pages.Take();
  pages.Release(page);
  EXPECT_EQ(pages.state(page), PageState::kFenced);
  EXPECT_EQ(pages.available(), 1);
  EXPECT_TRUE(pages.RetireStep(second));
  EXPECT_EQ(pages.state(page), PageState::kFenced);  // the first may read it
  const int64_t third = pages.BeginStep();
  EXPECT_TRUE(pages.RetireStep(first));
  EXPECT_EQ(pages.state(page), PageState::kFree);  // the third came later
  EXPECT_FALSE(pages.RetireStep(first));
  EXPECT_FALSE(pages.RetireStep(third + 1));
  EXPECT_TRUE(pages.RetireStep(third));
}

TEST(PagesTest, AFencedPageIsFoundAndFencedAnew) {
  Pages pages(2, true, 0);
  const int64_t first = pages.BeginStep();
  const int32_t page = Cache(pages, 3);
  EXPECT_EQ(pages.state(page), PageState::kFenced);
  ASSERT_EQ(pages.Lookup(Key(3)), page);
  pages.Share(page);
  EXPECT_EQ(pages.state(page), PageState::kPublished);
  const int64_t second = pages.BeginStep();
  pages.Release(page);
  EXPECT_TRUE(pages.RetireStep(first));  // lifts the old fence, not the new one
  EXPECT_EQ(pages.state(page), PageState::kFenced);
  EXPECT_TRUE(pages.RetireStep(second));
  EXPECT_EQ(pages.state(page), PageState::kEvictable);
}

// Random calls; what they must lead to is counted by hand.
TEST(PagesTest, CountsHoldUnderRandomCalls) {
  constexpr int32_t kPages = 40;
  std::mt19937 random(0);
  Pages pages(kPages, true, 0);
  std::vector<int32_t> holders(kPages, 0), held;
  std::vector<int64_t> steps;
  for (int i = 0; i < 20000; ++i) {
    const uint32_t choice = random() % 16;
    if (choice < 5 && pages.available() > 0) {
      const int32_t page = pages.Take();
      ASSERT_EQ(holders[page]++, 0);
      held.push_back(page);
    } else if (choice < 7 && !held.empty()) {
      const int32_t page = held[random() % held.size()];
      pages.Commit(page);
      if (pages.state(page) == PageState::kWritten) {
        pages.Publish(page, Key(random() % 60));
      }
    } else if (choice < 9) {
      const int32_t page = pages.Lookup(Key(random() % 60));
      if (page != Pages::kNone) {
        pages.Share(page);
        ++holders[page];
        held.push_back(page);
      }
    } else if (choice < 14 && !held.empty()) {
      std::swap(held[random() % held.size()], held.back());
      --holders[held.back()];
      pages.Release(held.back());
      held.pop_back();
    } else if (choice == 14) {
      steps.push_back(pages.BeginStep());
    } else if (!steps.empty()) {
      std::swap(steps[random() % steps.size()], steps.back());
      ASSERT_TRUE(pages.RetireStep(steps.back()));
      steps.pop_back();
    }
    if (i % 16 == 0) {
      ASSERT_EQ(std::string_view(pages.Audit(holders)), "");
    }
  }
}

}  // namespace
}  // namespace pagemill
