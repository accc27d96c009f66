#include "csrc/core/pool/block_pool.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/core/status.h"

namespace pagemill {
namespace {

using Ids = std::vector<int32_t>;

BlockHash Hash(std::string_view text, uint32_t group = 0) {
  return BlockHash::Of(
             {reinterpret_cast<const uint8_t*>(text.data()), text.size()},
             group)
      .value();
}

std::string Text(const BlockHash& hash) {
  return {hash.bytes.begin(), hash.bytes.begin() + hash.size};
}

class BlockPoolTest : public testing::Test {
 protected:
  Ids Take(int64_t count) { return pool_->Take(count).value(); }
  void Release(const Ids& blocks) {
    const Status status = pool_->Release(blocks);
    ASSERT_TRUE(status.ok()) << status.message();
  }
  void Publish(int32_t block, const BlockHash& hash) {
    const Status status = pool_->Publish(Ids{block}, std::vector{hash});
    ASSERT_TRUE(status.ok()) << status.message();
  }
  void TearDown() override {
    const Status status = pool_->Audit();
    EXPECT_TRUE(status.ok()) << status.message();
  }

  std::unique_ptr<BlockPool> pool_ =
      std::move(BlockPool::Create(8, true, true)).value();
};

TEST_F(BlockPoolTest, NeverGivesTheNullBlock) {
  EXPECT_EQ(pool_->num_free(), 7);
  EXPECT_EQ(Take(7), (Ids{1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(pool_->Take(1).status().code(), StatusCode::kResourceExhausted);
  Release({0, 3, 0});
  EXPECT_EQ(Take(1), Ids{3});
}

TEST_F(BlockPoolTest, OrderOfReuse) {
  Take(5);
  Publish(2, Hash("a"));
  Publish(4, Hash("b"));
  Release({1, 2, 3, 4});
  Release({5});
  EXPECT_EQ(Take(7), (Ids{5, 1, 3, 6, 7, 2, 4}));
  std::vector<std::string> evicted;
  for (const BlockHash& hash : pool_->TakeEvicted()) {
    evicted.push_back(Text(hash));
  }
  EXPECT_EQ(evicted, (std::vector<std::string>{"a", "b"}));
}

TEST_F(BlockPoolTest, FreedTwiceChangesNothing) {
  const Ids blocks = Take(3);
  ASSERT_TRUE(pool_->Share(Ids{2}).ok());
  const Status thrice = pool_->Release(Ids{1, 2, 2, 2});
  EXPECT_EQ(thrice.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(thrice.message().find("block 2 has ref_cnt=2"), std::string::npos);
  EXPECT_FALSE(pool_->Release(Ids{1, 8}).ok());
  EXPECT_FALSE(pool_->Release(Ids{1, -1}).ok());
  EXPECT_EQ(pool_->References(1).value(), 1);
  Release({2, 1, 2, 3});
  EXPECT_EQ(Take(3), (Ids{1, 2, 3}));
}

TEST_F(BlockPoolTest, TheFirstOfEqualHashesIsFound) {
  Take(3);
  for (const int32_t block : {2, 1, 3}) Publish(block, Hash("same"));
  EXPECT_EQ(pool_->Find(Hash("same")), 2);
  EXPECT_EQ(pool_->Find(Hash("same", 1)), BlockPool::kNone);
  ASSERT_TRUE(pool_->Forget(Ids{2}).ok());
  EXPECT_EQ(pool_->Find(Hash("same")), 1);
  EXPECT_EQ(pool_->References(2).value(), 1);
  EXPECT_FALSE(pool_->Publish(Ids{1}, std::vector{Hash("x")}).ok());
  const std::vector twice = {Hash("x"), Hash("y")};
  EXPECT_FALSE(pool_->Publish(Ids{2, 2}, twice).ok());
}

TEST_F(BlockPoolTest, AnotherHashOfTheSameKeyIsNotFound) {
  std::string one(32, '\0'), two(32, '\0');
  one[0] = 3;
  two[16] = 1;
  ASSERT_EQ(Hash(one).Key(), Hash(two).Key());
  Take(1);
  Publish(1, Hash(one));
  EXPECT_EQ(pool_->Find(Hash(one)), 1);
  EXPECT_EQ(pool_->Find(Hash(two)), BlockPool::kNone);
}

TEST_F(BlockPoolTest, ForgottenBlocksKeepTheirPlace) {
  Take(7);
  for (int32_t block = 1; block < 8; ++block) {
    Publish(block, Hash(std::string(1, static_cast<char>('a' + block))));
  }
  Release({3, 1, 2, 4, 5, 6, 7});
  ASSERT_TRUE(pool_->Forget(Ids{1}).ok());
  EXPECT_EQ(Take(2), (Ids{3, 1}));
  ASSERT_TRUE(pool_->Share(Ids{2}).ok());
  EXPECT_FALSE(pool_->Reset());
  Release({3, 2, 1});  // 1 and 3 have no hash any more
  EXPECT_TRUE(pool_->Reset());
  EXPECT_EQ(Take(7), (Ids{3, 1, 4, 5, 6, 7, 2}));
}

TEST_F(BlockPoolTest, SharesWhatWasForgotten) {
  Take(1);
  Publish(1, Hash("a"));
  Release({1});
  ASSERT_TRUE(pool_->Forget(Ids{1}).ok());
  ASSERT_TRUE(pool_->Share(Ids{1}).ok());
  Publish(1, Hash("b"));
  EXPECT_EQ(pool_->Find(Hash("b")), 1);
  Release({1});
  ASSERT_FALSE(pool_->Share(Ids{5}).ok());
}

TEST(BlockPoolWithoutCache, FindsNothing) {
  const auto pool = std::move(BlockPool::Create(4, false, false)).value();
  ASSERT_TRUE(pool->Take(2).ok());
  ASSERT_TRUE(pool->Publish(Ids{1}, std::vector{Hash("a")}).ok());
  EXPECT_EQ(pool->Find(Hash("a")), BlockPool::kNone);
  EXPECT_EQ(pool->HashOf(1).value(), nullptr);
}

}  // namespace
}  // namespace pagemill
