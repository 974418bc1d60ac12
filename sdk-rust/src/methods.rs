//! The operations of all clients, once. `for_each_operation` and `for_each_group` list their names, arguments and results. The
//! other macros turn the lists into the methods of an asynchronous or a blocking client.

/// Passes the list of operations to a macro that makes methods.
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

            /// Concatenates the tensors of all ranks of the set along the first dimension, in rank order; first dimensions
            /// may differ. Every rank gets the result.
            allgather, allgather_async<'a>(
                label: impl Into<Label<'a>>, tensor: impl Into<TensorRef<'a>>,
            ) -> Tensor = Operation::allgather(label, tensor);

            /// Concatenates the tensors of all ranks of the set as an all-gather does; the global rank `root` gets the
            /// result, the others `None`.
            gather, gather_async<'a>(
                label: impl Into<Label<'a>>, tensor: impl Into<TensorRef<'a>>, root: u32,
            ) -> Option<Tensor> = Operation::gather(label, tensor, root);

            /// Sends the tensor of the global rank `root` to every rank of the set.
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

            /// Sends a tensor to the global rank `to`, which receives it with the same tag. The n-th send of a pair of ranks
            /// and a tag matches the n-th receive. It completes when the receiver has posted its receive and the tensor has
            /// been sent: two ranks that each wait for a send before they receive may deadlock, so start one of the two first.
            send, send_async<'a>(
                tensor: impl Into<TensorRef<'a>>, to: u32, tag: u32,
            ) -> () = Operation::send(tensor, to, tag);

            /// Receives a tensor from the global rank `from`, which sends it with the same tag. Its type and shape are the
            /// sender's.
            ///
            /// Without a rank it takes the message of any rank of the set: the one that was announced first of those that no
            /// earlier receive takes. Receives with one tag take messages in the order in which they are posted.
            recv, recv_async(from: impl Into<Option<u32>>, tag: u32,) -> Tensor = Operation::recv(from, tag);

            /// [`Self::recv`] that also returns the rank that sent the message.
            recv_from, recv_from_async(from: impl Into<Option<u32>>, tag: u32,) -> Received = Operation::recv(from, tag);

            /// Waits until every rank of the set has called it.
            barrier, barrier_async<'a>(label: impl Into<Label<'a>>,) -> () = Operation::barrier(label);

            /// Announces that this rank has no more tensors: it contributes zeros to reductions of the other ranks until all
            /// ranks of the world have joined. Returns the rank that joined last. The numbers of operations without a name
            /// restart then.
            join, join_async() -> u32 = Operation::join();

            /// [`Self::join`] in a process set: this rank contributes zeros to reductions of the other ranks of the set until
            /// all of them have joined. Other sets are not affected. Returns the rank of the set that joined last. The
            /// numbers of the set's operations without a name restart then.
            join_in, join_in_async<'a>(label: impl Into<Label<'a>>,) -> u32 = Operation::join_in(label);

            /// Forms a process set of some global ranks. All ranks of the world call it, with the same ranks.
            add_process_set, add_process_set_async(ranks: &[u32],) -> ProcessSet = Operation::add_process_set(ranks);

            /// Forms a process set of some global ranks, which only these ranks call, each with the same ranks
            /// (`MPI_Comm_create_group`). A set of exactly these ranks that exists is the result, however it was made. The
            /// set lasts until the job ends or all ranks of the world remove it.
            ///
            /// Several may be pending at once: the n-th call with some ranks matches the n-th call of the others with them.
            add_process_set_of_members, add_process_set_of_members_async(
                ranks: &[u32],
            ) -> ProcessSet = Operation::add_process_set_of_members(ranks);
        }
    };
}

/// Passes the list of operations on several tensors, which become ready together, to a macro that makes methods.
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

/// The methods of all clients that describe the epoch.
macro_rules! epoch_methods {
    () => {
        impl Client {
            /// The rank, sizes and positions in the epoch.
            #[must_use]
            pub fn view(&self) -> &EpochView {
                &self.view
            }

            /// This worker's number in the job.
            #[must_use]
            pub fn rank(&self) -> u32 {
                self.view.rank.0
            }

            /// The number of workers in the job.
            #[must_use]
            pub fn size(&self) -> u32 {
                self.view.size
            }
        }
    };
}

/// The removal of a process set, for an asynchronous client with `submit` and `knows_set`.
macro_rules! async_set_removal {
    () => {
        impl Client {
            /// Removes a process set; pending operations on it fail. All ranks of the world call it. Returns false, without
            /// communication, for the set of all ranks and for an unknown set.
            ///
            /// # Errors
            /// Those of [`Client::allreduce`].
            pub async fn remove_process_set(&self, set: SetId) -> Result<bool, Error> {
                if set == SetId::WORLD || !self.knows_set(set)? {
                    return Ok(false);
                }
                self.remove_process_set_async(set).await?.wait().await?;
                Ok(true)
            }

            /// [`Client::remove_process_set`] of a known set, which returns at once.
            ///
            /// # Errors
            /// Those of [`Client::allreduce_async`].
            pub async fn remove_process_set_async(&self, set: SetId) -> Result<Handle<()>, Error> {
                Ok(self.submit(&Operation::remove_process_set(set)).await?.typed())
            }
        }
    };
}

/// The removal of a process set, for a blocking client with `submit_from` and `knows_set`.
#[cfg(not(target_arch = "wasm32"))]
macro_rules! blocking_set_removal {
    () => {
        impl Client {
            /// Removes a process set; pending operations on it fail. All ranks of the world call it. Returns false, without
            /// communication, for the set of all ranks and for an unknown set.
            ///
            /// # Errors
            /// Those of [`Client::allreduce`].
            #[track_caller]
            pub fn remove_process_set(&self, set: SetId) -> Result<bool, Error> {
                if set == SetId::WORLD || !self.knows_set(set)? {
                    return Ok(false);
                }
                self.remove_process_set_async(set)?.wait()?;
                Ok(true)
            }

            /// [`Client::remove_process_set`] of a known set, which returns at once.
            ///
            /// # Errors
            /// Those of [`Client::allreduce_async`].
            #[track_caller]
            pub fn remove_process_set_async(&self, set: SetId) -> Result<Handle<()>, Error> {
                Ok(self.submit_from(&Site::here().of(Operation::remove_process_set(set)))?.typed())
            }
        }
    };
}

/// The operations of an asynchronous client with `submit`.
macro_rules! async_operations {
    ($($(#[doc = $doc:literal])* $name:ident, $start:ident$(<$life:lifetime>)?($($argument:ident: $type:ty,)*) -> $result:ty = $operation:expr;)*) => {
        impl Client {$(
            $(#[doc = $doc])*
            ///
            /// # Errors
            /// [`Error::Argument`] and [`Error::Limit`] at once; [`Error::Failure`], which names the failed rank, later.
            #[track_caller]
            pub fn $name$(<$life>)?(&self, $($argument: $type),*) -> impl Future<Output = Result<$result, Error>> {
                let started = self.$start($($argument),*);
                async move { started.await?.wait().await }
            }

            #[doc = concat!("[`Client::", stringify!($name), "`] that returns when the operation has been submitted.")]
            ///
            /// # Errors
            /// [`Error::Argument`], [`Error::Limit`], or why the session is over.
            #[track_caller]
            pub fn $start$(<$life>)?(&self, $($argument: $type),*) -> impl Future<Output = Result<Handle<$result>, Error>> {
                let site = Site::here();
                async move { Ok(self.submit(&site.of($operation)).await?.typed()) }
            }
        )*}
    };
}

/// The operations of a blocking client with `submit_from`.
#[cfg(not(target_arch = "wasm32"))]
macro_rules! blocking_operations {
    ($($(#[doc = $doc:literal])* $name:ident, $start:ident$(<$life:lifetime>)?($($argument:ident: $type:ty,)*) -> $result:ty = $operation:expr;)*) => {
        impl Client {$(
            $(#[doc = $doc])*
            ///
            /// # Errors
            /// [`Error::Argument`] and [`Error::Limit`] at once; [`Error::Failure`], which names the failed rank, later.
            #[track_caller]
            pub fn $name$(<$life>)?(&self, $($argument: $type),*) -> Result<$result, Error> {
                self.$start($($argument),*)?.wait()
            }

            #[doc = concat!("[`Client::", stringify!($name), "`] that returns when the operation has been submitted.")]
            ///
            /// # Errors
            /// [`Error::Argument`], [`Error::Limit`], or why the session is over.
            #[track_caller]
            pub fn $start$(<$life>)?(&self, $($argument: $type),*) -> Result<Handle<$result>, Error> {
                Ok(self.submit_from(&Site::here().of($operation))?.typed())
            }
        )*}
    };
}

/// The operations on several tensors of an asynchronous client with `submit_group`.
macro_rules! async_groups {
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

            #[doc = concat!("[`Client::", stringify!($name), "`] that returns when the operations have been submitted.")]
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

/// The operations on several tensors of a blocking client with `submit_group_from`.
#[cfg(not(target_arch = "wasm32"))]
macro_rules! blocking_groups {
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
            ) -> Result<Vec<Tensor>, Error> {
                self.$start(label, tensors, $($argument),*)?.into_iter().map(Handle::wait).collect()
            }

            #[doc = concat!("[`Client::", stringify!($name), "`] that returns when the operations have been submitted.")]
            ///
            /// # Errors
            /// [`Error::Argument`], [`Error::Limit`], or why the session is over.
            #[track_caller]
            pub fn $start<'a>(
                &self,
                label: impl Into<Label<'a>>,
                tensors: &[TensorRef<'a>],
                $($argument: $type),*
            ) -> Result<Vec<Handle<Tensor>>, Error> {
                let site = Site::here();
                let label = label.into();
                $(let $argument = $argument.into();)*
                let make = $operation;
                let one = |tensor: &_| site.of(make(Label { name: None, ..label }, *tensor, $(&$argument),*));
                let operations: Vec<_> = tensors.iter().map(one).collect();
                let handles = self.submit_group_from(label, &operations)?;
                Ok(handles.into_iter().map(Handle::typed).collect())
            }
        )*}
    };
}

pub(crate) use {async_groups, async_operations, async_set_removal, epoch_methods, for_each_group, for_each_operation};
#[cfg(not(target_arch = "wasm32"))]
pub(crate) use {blocking_groups, blocking_operations, blocking_set_removal};
