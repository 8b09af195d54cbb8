// What the status of a refused request says beside its code and words: why it was refused, for the metrics
// and unknown to clients, and when it may come again. Both are payloads of the absl::Status.
#ifndef MESHFILL_SERVER_QUEUE_REFUSAL_H_
#define MESHFILL_SERVER_QUEUE_REFUSAL_H_

#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/observe/metrics.h"

namespace meshfill {

inline constexpr absl::string_view kRefusalUrl = "meshfill/refusal";  // type URL of the status' payload

// `status`, an error, with its reason where the code alone does not tell.
absl::Status WithRefusal(absl::Status status, Refusal refusal);
// The reason that it was given, or what its code says.
Refusal RefusalOf(const absl::Status& status);

// `status` with the advice to try again after `delay`: google.rpc.RetryInfo.
absl::Status WithRetryAfter(absl::Status status, absl::Duration delay);
std::optional<absl::Duration> RetryAfter(const absl::Status& status);

// Tells those whom a full queue refuses when to come again: one after the other, as fast as the pool serves
// them, and not all at once. A tenant's requests wait for its own alone, so that nobody else's announcements
// make it come later. Advice: no place is kept. Pure; not thread-safe.
class RetryLine {
 public:
  // A request's wait counts this part of the predicted work before it: it comes a little too soon, rather
  // than the pool standing idle.
  static constexpr double kPace = 0.8;

  explicit RetryLine(absl::Duration longest) : longest_(longest) {}

  // Seconds that a request of so much predicted work stands behind those of its tenant that were told before,
  // at most the longest. The next one stands behind it, too.
  double Join(const std::string& tenant, double work_seconds, absl::Time now);

 private:
  const absl::Duration longest_;
  std::map<std::string, absl::Time> ends_;  // by tenant; those that are over go as others come
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_QUEUE_REFUSAL_H_
