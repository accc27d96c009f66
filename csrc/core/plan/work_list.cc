#include "csrc/core/plan/work_list.h"

#include <algorithm>
#include <array>
#include <limits>
#include <tuple>

#include "csrc/core/str_cat.h"

namespace pagemill {
namespace {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

struct Tile {
  int64_t row;
  int64_t q_begin, q_end;
  int64_t kv_begin, kv_end;
};

template <typename Visit>
void ForEachTile(const BatchView& batch, const WorkOptions& options,
                 Visit visit) {
  for (int64_t row = 0; row < batch.num_seqs; ++row) {
    const int64_t begin = batch.q_begin(row), q_len = batch.q_len(row);
    const int64_t kv_len = batch.kv_len(row);
    for (int64_t q = 0; q < q_len; q += options.q_block) {
      const int64_t q_end = std::min(q + options.q_block, q_len);
      // The tile's positions, from its first query's to behind its last's.
      const int64_t first = kv_len - q_len + q, end = kv_len - q_len + q_end;
      const int64_t seen =
          options.sliding_window == 0
              ? 0
              : std::max<int64_t>(0, first - options.sliding_window + 1);
      visit(Tile{.row = row,
                 .q_begin = begin + q,
                 .q_end = begin + q_end,
                 .kv_begin = seen - seen % options.kv_block,
                 .kv_end = options.causal ? end : kv_len});
    }
  }
}

int64_t MaxKv(const WorkOptions& options) {
  return options.max_kv_per_item == 0 ? kInt32Max : options.max_kv_per_item;
}

Status CheckMultiple(const char* name, int64_t value, const char* unit_name,
                     int64_t unit) {
  if (value % unit == 0) return Status();
  return InvalidArgument(StrCat(name, "=", value, " must be a multiple of ",
                                unit_name, "=", unit, ". Round it up to ",
                                (value / unit + 1) * unit, "."));
}

}  // namespace

Status CheckWorkOptions(const BatchView& batch, const WorkOptions& options) {
  const std::array<std::tuple<const char*, int64_t, int64_t>, 4> least = {{
      {"q_block", options.q_block, 1},
      {"kv_block", options.kv_block, 1},
      {"sliding_window", options.sliding_window, 0},
      {"max_kv_per_item", options.max_kv_per_item, 0},
  }};
  for (const auto& [name, value, min] : least) {
    if (value < min || value > kInt32Max) {
      return InvalidArgument(StrCat(name, "=", value, " must be in range [",
                                    min, ", ", kInt32Max, "]."));
    }
  }
  if (Status s = CheckMultiple("kv_block", options.kv_block, "page_size",
                               batch.page_size);
      !s.ok()) {
    return s;
  }
  return CheckMultiple("max_kv_per_item", options.max_kv_per_item, "kv_block",
                       options.kv_block);
}

int64_t CountWork(const BatchView& batch, const WorkOptions& options) {
  const int64_t max_kv = MaxKv(options);
  int64_t items = 0;
  ForEachTile(batch, options, [&](const Tile& tile) {
    items += (tile.kv_end - tile.kv_begin + max_kv - 1) / max_kv;
  });
  return items;
}

void WriteWork(const BatchView& batch, const WorkOptions& options,
               std::span<int32_t> items) {
  const int64_t max_kv = MaxKv(options);
  auto out = items.begin();
  const auto write = [&](auto... values) {
    ((*out++ = static_cast<int32_t>(values)), ...);
  };
  ForEachTile(batch, options, [&](const Tile& tile) {
    for (int64_t kv = tile.kv_begin; kv < tile.kv_end; kv += max_kv) {
      const int64_t kv_end = std::min(kv + max_kv, tile.kv_end);
      write(tile.row, tile.q_begin, tile.q_end, kv, kv_end,
            (kv == tile.kv_begin ? kFirstOfTile : 0) |
                (kv_end == tile.kv_end ? kLastOfTile : 0));
    }
  });
  while (out != items.end()) write(-1, 0, 0, 0, 0, 0);
}

}  // namespace pagemill
