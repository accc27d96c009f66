// Keys that name the pages of a token sequence by content, for prefix reuse.
//
//   root     = SHA-256(tag || secret || salt || page_size)
//   key of 0 = SHA-256(root || tokens of page 0)
//   key of i = SHA-256(key of i-1 || tokens of page i)
//
// A key stands for all tokens up to its page's end, so equal keys mean equal
// prefixes, of the same page size, under the same secret and salt.  The secret
// (one per process or fleet) keeps those outside from computing keys; the salt
// (one per tenant or adapter) keeps those inside from sharing pages.  Whoever
// learns a key can try guesses of the page that follows it: keys stay inside.
//
// Secret and salt carry their lengths (u64) in front of them; all integers are
// little-endian, tokens int32.
#ifndef PAGEMILL_CSRC_CORE_PREFIX_KEY_H_
#define PAGEMILL_CSRC_CORE_PREFIX_KEY_H_

#include <cstdint>
#include <span>

#include "csrc/core/sha256.h"

namespace pagemill {

class PrefixChain {
 public:
  PrefixChain(std::span<const uint8_t> secret, std::span<const uint8_t> salt,
              int64_t page_size);

  // The parent of every sequence's first page.
  const Sha256Digest& Root() const { return root_; }

  // The key of a page from its parent's and its own page_size tokens.  Pages of
  // 16, 32, 64 and 128 tokens are fastest: their padded messages are built in
  // one piece, without a Sha256.
  static Sha256Digest Extend(const Sha256Digest& parent,
                             std::span<const int32_t> page_tokens);

  // The keys of tokens.size() / page_size full pages, into out; tokens past
  // them are not looked at.  page_size >= 1.
  static void ExtendMany(Sha256Digest parent, std::span<const int32_t> tokens,
                         int64_t page_size, Sha256Digest* out);

 private:
  Sha256Digest root_;  // of the secret, only this is kept
};

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_PREFIX_KEY_H_
