// Status and Result<T>: how the core reports failure without exceptions.
#ifndef PAGEMILL_CSRC_CORE_STATUS_H_
#define PAGEMILL_CSRC_CORE_STATUS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>

namespace pagemill {

// Named as the canonical codes are elsewhere; only the ones the core returns.
enum class StatusCode {
  kOk = 0,
  kInvalidArgument,    // The caller's values are wrong.
  kResourceExhausted,  // Right values, but not enough pages.
  kUnavailable,        // Right values, at a time when something is in use.
  kInternal,           // A bug in Pagemill.
};

// Pages that a refused request needs, and what there was: free, held by nobody
// but cached, and held by nobody but steps in flight.
struct Shortage {
  int64_t need = 0;
  int64_t free = 0;
  int64_t evictable = 0;
  int64_t fenced = 0;
};

// One pointer where all is well: hot loops may return it.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message, Shortage shortage = {})
      : failure_(std::make_shared<const Failure>(
            Failure{code, std::move(message), shortage})) {}

  bool ok() const { return failure_ == nullptr; }
  StatusCode code() const { return get().code; }
  const std::string& message() const { return get().message; }
  const Shortage& shortage() const { return get().shortage; }

 private:
  struct Failure {
    StatusCode code = StatusCode::kOk;
    std::string message;
    Shortage shortage;
  };
  const Failure& get() const {
    static const Failure kNone;
    return ok() ? kNone : *failure_;
  }

  std::shared_ptr<const Failure> failure_;
};

inline Status InvalidArgument(std::string message) {
  return {StatusCode::kInvalidArgument, std::move(message)};
}
inline Status Unavailable(std::string message) {
  return {StatusCode::kUnavailable, std::move(message)};
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
