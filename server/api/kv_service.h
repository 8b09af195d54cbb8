// The front-end's part in kept K and V: admits prompts, answers FetchKv, RenewKv and ReleaseKv, and ends
// leases in time.
//
// One thread waits for what the store says has changed and for the next lease to lapse. It wakes the streams,
// so that a rank that has finished a layer only leaves word of it. Thread-safe.
#ifndef MESHFILL_SERVER_API_KV_SERVICE_H_
#define MESHFILL_SERVER_API_KV_SERVICE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/kv/kv_store.h"
#include "grpcpp/server_context.h"
#include "kernels/mutex.h"
#include "meshfill/v1/prefill.pb.h"
#include "server/api/kv_fetch_stream.h"
#include "server/observe/metrics.h"

namespace meshfill {

class KvService {
 public:
  struct Options {
    absl::Duration lease = absl::Seconds(30);  // where a request does not say
    absl::Duration max_lease = absl::Hours(1);
    int block_tokens = 16;
    int64_t max_message_bytes = 4 << 20;
  };

  // Both outlive the service.
  KvService(KvStore& store, const Options& options, Metrics& metrics);
  ~KvService();  // no stream is live any more
  KvService(const KvService&) = delete;
  KvService& operator=(const KvService&) = delete;

  const Options& options() const { return options_; }
  KvStore& store() { return store_; }

  // A lease for a prompt that no run has begun; `seconds` as a request says them. RESOURCE_EXHAUSTED: no
  // room, with RetryInfo where leases will make some.
  absl::StatusOr<std::unique_ptr<KvLease>> Admit(const std::shared_ptr<KvPrompt>& prompt,
                                                 const std::string& tenant, uint32_t seconds);

  KvFetchReactor* Fetch(grpc::CallbackServerContext* context, const v1::FetchKvRequest* request);
  absl::StatusOr<v1::KvLease> Renew(const v1::RenewKvRequest& request, const std::string& tenant);
  void Release(const v1::ReleaseKvRequest& request, const std::string& tenant);

  // False where a lease is live at the deadline.
  bool WaitUntilNoLease(absl::Time deadline);
  void WaitUntilNoStream();

  // Streams call these.
  void OnFetched(int64_t bytes) { metrics_.OnKvFetched(bytes); }
  void Remove(KvFetchStream* stream);  // destroys it, now or once its OnChange returns

 private:
  absl::Duration LeaseOf(uint32_t seconds) const;
  void Watch();
  void Publish() const;

  KvStore& store_;
  const Options options_;
  Metrics& metrics_;

  Mutex mu_;
  CondVar wake_;     // of the thread
  CondVar settled_;  // the thread has done its round, or a stream has gone
  bool changed_ ABSL_GUARDED_BY(mu_) = true;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  // Shared: the thread may be in OnChange while gRPC lets go of a stream.
  std::map<KvFetchStream*, std::shared_ptr<KvFetchStream>> streams_ ABSL_GUARDED_BY(mu_);
  std::thread watcher_;  // last: it uses all of the above
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_KV_SERVICE_H_
