// A call whose mask and bias have been brought into the operators' form before, and how to make it again.
#pragma once

#include <memory>
#include <vector>

#include "call_args.h"

namespace flash_ext {

class PreparedCall {
 public:
  // q and k: of a call that these arguments are right for; their sizes and their device count.
  PreparedCall(const Tensor& q, const Tensor& k, const CallArgs& args);

  // What the arguments were made of: another call wants arguments of its own where one of these has been written since,
  // or requires a gradient.
  void watch(const std::vector<Tensor>& sources);
  // The arguments hold numbers that were made on the current stream: nothing makes other streams wait for them.
  void bind_stream();
  // Dimensions of size 1 that the bias of the arguments lacks in front.
  void set_missing_bias_dims(int64_t count) { missing_bias_dims_ = count; }
  // Nothing but the window is asked for, beside what each call says anew.
  void set_plain() { is_plain_ = true; }

  // The mask says documents alone. Calls that may run as packed sequences want to be told where those begin and end,
  // and are not served before. Null: they do not stand together, and ids are compared, of which `args` tell.
  void expect_borders() { awaits_borders_ = true; }
  void set_borders(const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k);
  // Whether a call may: its rows lie one behind the other, a bias knows distances alone, and nothing is dropped, since
  // draws belong to rows and keys as they are. Not in the batch-invariant mode: ids of one batch entry decide for all.
  bool may_pack(const Tensor& q, const Tensor& k, const Tensor& v, double dropout_p) const;

  // Whether the arguments are right for a call of these queries, whatever its keys are.
  bool fits(const Tensor& q, const OptionalTensor& cu_seqlens_q) const;

  // The result, or nothing if the arguments are not right for this call.
  std::optional<FwdModResult> forward(const Tensor& q, const Tensor& k, const Tensor& v, const CallArgs& own) const;
  std::optional<BwdResult> backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                    const Tensor& out, const Tensor& lse, const CallArgs& own) const;

 private:
  struct Source {
    Tensor tensor;
    int64_t version;
  };

  bool fits_both(const Tensor& q, const Tensor& k, const CallArgs& own) const;
  // What was prepared, with what is the call's own: lengths, scale, sinks, softcap, dropout and flags.
  CallArgs joined(const Tensor& q, const CallArgs& own) const;
  // The same of the packed sequences that a call runs as.
  CallArgs packed(const Tensor& q, const CallArgs& own) const;

  CallArgs args_;
  bool is_packed_;
  int64_t batch_, heads_, rows_, keys_;
  c10::Device device_;
  std::vector<Source> sources_;
  bool has_inference_tensors_ = false;
  bool is_bound_ = false;
  void* stream_ = nullptr;
  int64_t missing_bias_dims_ = 0;
  bool is_plain_ = false;
  bool awaits_borders_ = false;
  OptionalTensor borders_q_, borders_k_;
};

}  // namespace flash_ext
