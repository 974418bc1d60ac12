//! The list of operations that all clients have methods for. Each client makes of an entry the method that waits and the
//! one that returns a handle, so that there is one list of names, arguments and results.

/// Gives the list to a macro of a client.
macro_rules! for_each_operation {
    ($make:ident) => {
        $make! {
            /// Reduces a tensor over all ranks of the set; every rank gets the result.
            allreduce, allreduce_async<'a>(
                label: impl Into<Label<'a>>, tensor: impl Into<TensorRef<'a>>, options: impl Into<ReduceOptions>,
            ) -> Tensor = Operation::allreduce(label, tensor, options);

            /// Reduces a tensor over all ranks of the set and divides its rows: the first `rows % ranks` ranks of the set
            /// get one more. Every rank gets its share.
            reduce_scatter, reduce_scatter_async<'a>(
                label: impl Into<Label<'a>>, tensor: impl Into<TensorRef<'a>>, options: impl Into<ReduceOptions>,
            ) -> Tensor = Operation::reduce_scatter(label, tensor, options);

            /// Reduces a tensor over all ranks of the set; the global rank `root` gets the result, the others `None`.
            reduce, reduce_async<'a>(
                label: impl Into<Label<'a>>, tensor: impl Into<TensorRef<'a>>, root: u32, options: impl Into<ReduceOptions>,
            ) -> Option<Tensor> = Operation::reduce(label, tensor, root, options);

            /// Joins the tensors of all ranks of the set along the first dimension, in rank order; first dimensions may
            /// differ. Every rank gets the result.
            allgather, allgather_async<'a>(
                label: impl Into<Label<'a>>, tensor: impl Into<TensorRef<'a>>,
            ) -> Tensor = Operation::allgather(label, tensor);

            /// Joins the tensors of all ranks of the set as an all-gather does; the global rank `root` gets the result, the
            /// others `None`.
            gather, gather_async<'a>(
                label: impl Into<Label<'a>>, tensor: impl Into<TensorRef<'a>>, root: u32,
            ) -> Option<Tensor> = Operation::gather(label, tensor, root);

            /// Gives every rank of the set the tensor of the global rank `root`.
            broadcast, broadcast_async<'a>(
                label: impl Into<Label<'a>>, tensor: impl Into<TensorRef<'a>>, root: u32,
            ) -> Tensor = Operation::broadcast(label, tensor, root);

            /// Divides the rows of the tensor of the global rank `root` among the ranks of the set: the first
            /// `rows % ranks` get one more. The other ranks need no tensor.
            scatter, scatter_async<'a>(
                label: impl Into<Label<'a>>, tensor: Option<TensorRef<'a>>, root: u32,
            ) -> Tensor = Operation::scatter(label, tensor, root);

            /// Sends rows to every rank of the set and gets rows from every rank: `splits` has the number of rows for each
            /// rank, in rank order, and adds up to the tensor's; `None` divides them equally.
            alltoall, alltoall_async<'a>(
                label: impl Into<Label<'a>>, tensor: impl Into<TensorRef<'a>>, splits: Option<&[u64]>,
            ) -> Exchanged = Operation::alltoall(label, tensor, splits);

            /// Hands a tensor to the global rank `to`, which receives it with the same tag. The n-th send of a pair of
            /// ranks and a tag meets the n-th receive. Complete when the receiver has come for it and the tensor has left:
            /// a rank that waits for a send before it receives may wait for ever, so start one of the two first.
            send, send_async<'a>(
                tensor: impl Into<TensorRef<'a>>, to: u32, tag: u32,
            ) -> () = Operation::send(tensor, to, tag);

            /// Gets a tensor from the global rank `from`, which sends it with the same tag. Its type and shape are the
            /// sender's.
            ///
            /// Without a rank it takes the message of any rank of the set: of those that no earlier receive takes, the one that
            /// was announced first. Receives with one tag take messages in the order in which they are posted.
            recv, recv_async(from: impl Into<Option<u32>>, tag: u32,) -> Tensor = Operation::recv(from, tag);

            /// [`Self::recv`] that also gives the rank that sent it.
            recv_from, recv_from_async(from: impl Into<Option<u32>>, tag: u32,) -> Received = Operation::recv(from, tag);

            /// Waits until every rank of the set has called it.
            barrier, barrier_async<'a>(label: impl Into<Label<'a>>,) -> () = Operation::barrier(label);

            /// This rank has no more tensors: it takes part with zeros in what others reduce, until all ranks of the world
            /// have joined. Gives the rank that joined last. Operations without a name are numbered anew then.
            join, join_async() -> u32 = Operation::join();

            /// Forms a process set of some global ranks. All ranks of the world call it, with the same ranks.
            add_process_set, add_process_set_async(ranks: &[u32],) -> ProcessSet = Operation::add_process_set(ranks);
        }
    };
}

/// Gives the list of operations on several tensors, which become ready together, to a macro of a client.
macro_rules! for_each_group {
    ($make:ident) => {
        $make! {
            /// [`Client::allreduce`] of several tensors, none of which begins before all are there on all ranks.
            grouped_allreduce, grouped_allreduce_async(options: impl Into<ReduceOptions>,)
                = |label, tensor, options: &ReduceOptions| Operation::allreduce(label, tensor, options.clone());

            /// [`Client::reduce_scatter`] of several tensors, none of which begins before all are there on all ranks.
            grouped_reduce_scatter, grouped_reduce_scatter_async(options: impl Into<ReduceOptions>,)
                = |label, tensor, options: &ReduceOptions| Operation::reduce_scatter(label, tensor, options.clone());

            /// [`Client::allgather`] of several tensors, none of which begins before all are there on all ranks.
            grouped_allgather, grouped_allgather_async()
                = |label, tensor| Operation::allgather(label, tensor);

            /// [`Client::broadcast`] of several tensors, none of which begins before all are there on all ranks.
            grouped_broadcast, grouped_broadcast_async(root: impl Into<u32>,)
                = |label, tensor, root: &u32| Operation::broadcast(label, tensor, *root);
        }
    };
}

/// Methods of an asynchronous client, which has `submit`.
macro_rules! operations {
    ($($(#[doc = $doc:literal])* $name:ident, $start:ident$(<$life:lifetime>)?($($argument:ident: $type:ty,)*) -> $gives:ty = $operation:expr;)*) => {
        impl Client {$(
            $(#[doc = $doc])*
            ///
            /// # Errors
            /// [`Error::Argument`] and [`Error::Limit`] at once; [`Error::Failure`] with the culprit when it fails.
            #[track_caller]
            pub fn $name$(<$life>)?(&self, $($argument: $type),*) -> impl Future<Output = Result<$gives, Error>> {
                let started = self.$start($($argument),*);
                async move { started.await?.wait().await }
            }

            #[doc = concat!("[`Client::", stringify!($name), "`] that returns when the tensor has been handed over.")]
            ///
            /// # Errors
            /// [`Error::Argument`], [`Error::Limit`], or why the session is over.
            #[track_caller]
            pub fn $start$(<$life>)?(&self, $($argument: $type),*) -> impl Future<Output = Result<Handle<$gives>, Error>> {
                let site = Site::here();
                async move { Ok(self.submit(&site.of($operation)).await?.typed()) }
            }
        )*}
    };
}

/// Methods of an asynchronous client, which has `submit_group`.
macro_rules! groups {
    ($($(#[doc = $doc:literal])* $name:ident, $start:ident($($argument:ident: $type:ty,)*) = $operation:expr;)*) => {
        impl Client {$(
            $(#[doc = $doc])*
            /// Results come in the order of the tensors.
            ///
            /// # Errors
            /// Those of the operation on one tensor, of the first that fails.
            #[track_caller]
            pub fn $name<'a>(
                &self,
                label: impl Into<Label<'a>>,
                tensors: &[TensorRef<'a>],
                $($argument: $type),*
            ) -> impl Future<Output = Result<Vec<Tensor>, Error>> {
                let started = self.$start(label, tensors, $($argument),*);
                async move {
                    let mut results = Vec::with_capacity(tensors.len());
                    for handle in started.await? {
                        results.push(handle.wait().await?);
                    }
                    Ok(results)
                }
            }

            #[doc = concat!("[`Client::", stringify!($name), "`] that returns when the tensors have been handed over.")]
            ///
            /// # Errors
            /// [`Error::Argument`], [`Error::Limit`], or why the session is over.
            #[track_caller]
            pub fn $start<'a>(
                &self,
                label: impl Into<Label<'a>>,
                tensors: &[TensorRef<'a>],
                $($argument: $type),*
            ) -> impl Future<Output = Result<Vec<Handle<Tensor>>, Error>> {
                let site = Site::here();
                let label = label.into();
                $(let $argument = $argument.into();)*
                let make = $operation;
                let one = |tensor: &_| site.of(make(Label { name: None, ..label }, *tensor, $(&$argument),*));
                let operations: Vec<_> = tensors.iter().map(one).collect();
                async move {
                    let handles = self.submit_group(label, &operations).await?;
                    Ok(handles.into_iter().map(Handle::typed).collect())
                }
            }
        )*}
    };
}

pub(crate) use {for_each_group, for_each_operation, groups, operations};
