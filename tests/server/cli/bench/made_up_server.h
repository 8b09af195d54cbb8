// A server that computes nothing, for tests of its clients.
#ifndef MESHFILL_TESTS_SERVER_CLI_BENCH_MADE_UP_SERVER_H_
#define MESHFILL_TESTS_SERVER_CLI_BENCH_MADE_UP_SERVER_H_

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/mutex.h"
#include "meshfill/v1/prefill.grpc.pb.h"
#include "server/api/status_details.h"
#include "server/queue/refusal.h"

namespace meshfill {

// Answers every prompt at once, with figures that stay the same, and with its first token.
class MadeUpServer final : public v1::PrefillService::Service {
 public:
  MadeUpServer() {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    address_ = absl::StrCat("127.0.0.1:", port);
  }
  ~MadeUpServer() override { Stop(); }
  void Stop() { server_->Shutdown(); }

  const std::string& address() const { return address_; }
  uint64_t vocab = 7;
  int refuse_every = 0;  // refuses one try of so many; 0: none
  // Whether a try loses its place once it is accepted: by its number, from 1.
  std::function<bool(int tries)> drops = [](int) { return false; };
  // Whether a try fails for good: by its prompt's tenant, and by its number, from 1.
  std::function<bool(const std::string& tenant, int tries)> fails = [](const std::string&, int) {
    return false;
  };
  std::function<uint32_t(int tries)> answers_wrong_by = [](int) { return 0; };
  int most_at_once() {
    const MutexLock lock(mu_);
    return most_at_once_;
  }
  int refused() {
    const MutexLock lock(mu_);
    return refused_;
  }
  std::vector<std::pair<std::string, std::vector<uint32_t>>> prompts() {  // tenant and tokens, of all tries
    const MutexLock lock(mu_);
    return prompts_;
  }

  std::vector<bool> ignore_cache() {  // of the same tries
    const MutexLock lock(mu_);
    return ignore_cache_;
  }
  std::vector<int> priorities() {  // of the same tries
    const MutexLock lock(mu_);
    return priorities_;
  }

  grpc::Status GetPool(grpc::ServerContext*, const v1::GetPoolRequest*, v1::PoolStatus* status) override {
    status->set_vocab(vocab);
    return grpc::Status::OK;
  }

  grpc::Status Prefill(grpc::ServerContext*,
                       grpc::ServerReaderWriter<v1::PrefillEvent, v1::PrefillRequest>* stream) override {
    std::pair<std::string, std::vector<uint32_t>> prompt;
    v1::PrefillRequest request;
    bool ignore_cache = false;
    int priority = 0;
    while (stream->Read(&request)) {
      if (request.has_header()) {
        prompt.first = request.header().tenant();
        ignore_cache = request.header().kv().ignore_cache();
        priority = request.header().priority();
      }
      prompt.second.insert(prompt.second.end(), request.tokens().ids().begin(), request.tokens().ids().end());
    }
    uint32_t top = 0;
    bool is_dropped = false;
    {
      const MutexLock lock(mu_);
      prompts_.push_back(std::move(prompt));
      ignore_cache_.push_back(ignore_cache);
      priorities_.push_back(priority);
      most_at_once_ = std::max(most_at_once_, ++at_once_);
      const int tries = static_cast<int>(prompts_.size());
      if (refuse_every > 0 && tries % refuse_every == 0) {
        --at_once_;
        ++refused_;
        return full_;
      }
      is_dropped = drops(tries);
      if (fails(prompts_.back().first, tries)) {
        --at_once_;
        return {grpc::StatusCode::INTERNAL, "broken"};
      }
      top = prompts_.back().second.front() + answers_wrong_by(tries);
    }
    v1::PrefillEvent event;
    event.mutable_accepted()->set_predicted_seconds(0.5);
    event.mutable_accepted()->set_predicted_queue_seconds(0.25);
    stream->Write(event);
    if (is_dropped) {
      const MutexLock lock(mu_);
      --at_once_;
      return full_;
    }
    event.mutable_result()->mutable_seconds()->set_queue(0.125);
    event.mutable_result()->mutable_seconds()->set_prefill(2);
    event.mutable_result()->add_top()->set_token(top);
    stream->Write(event);
    const MutexLock lock(mu_);
    --at_once_;
    return grpc::Status::OK;
  }

 private:
  const grpc::Status full_ =
      ToGrpcStatus(WithRetryAfter(absl::ResourceExhaustedError("full"), absl::Microseconds(100)));

  std::unique_ptr<grpc::Server> server_;
  std::string address_;
  Mutex mu_;
  int at_once_ = 0;
  int most_at_once_ = 0;
  int refused_ = 0;
  std::vector<std::pair<std::string, std::vector<uint32_t>>> prompts_;
  std::vector<bool> ignore_cache_;
  std::vector<int> priorities_;
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_SERVER_CLI_BENCH_MADE_UP_SERVER_H_
