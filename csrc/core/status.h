// Status and Result<T>: how the core reports failure without exceptions.
#ifndef PAGEMILL_CSRC_CORE_STATUS_H_
#define PAGEMILL_CSRC_CORE_STATUS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <variant>

namespace pagemill {

// Named as the canonical codes are elsewhere; only the ones the core returns.
enum class StatusCode {
  kOk = 0,
  kInvalidArgument,    // The caller's values are wrong.
  kResourceExhausted,  // Right values, but not enough pages.
  kInternal,           // A bug in Pagemill.
};

// Pages that a refused request needs, and pages that were free.
struct Shortage {
  int64_t need = 0;
  int64_t free = 0;
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message, Shortage shortage = {})
      : code_(code), message_(std::move(message)), shortage_(shortage) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }
  const Shortage& shortage() const { return shortage_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
  Shortage shortage_;
};

inline Status InvalidArgument(std::string message) {
  return {StatusCode::kInvalidArgument, std::move(message)};
}
inline Status Internal(std::string message) {
  return {StatusCode::kInternal, std::move(message)};
}

// Either a value or the status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}         // NOLINT
  Result(Status status) : state_(std::move(status)) {}  // NOLINT

  bool ok() const { return std::holds_alternative<T>(state_); }
  Status status() const { return ok() ? Status() : std::get<Status>(state_); }
  const T& value() const& { return std::get<T>(state_); }
  T&& value() && { return std::get<T>(std::move(state_)); }

 private:
  std::variant<T, Status> state_;
};

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_STATUS_H_
